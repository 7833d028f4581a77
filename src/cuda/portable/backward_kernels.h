// The backward kernels by element type, head size and tiling. One file compiles those of each type.
#pragma once

#include "cuda/portable/tuning.h"

namespace anyflash::cuda {

struct BackwardKernels {
  const void *terms, *rests, *gradients;      ///< numbers of query rows; those that are rarely needed; all gradients
  int threads, terms_bytes, gradients_bytes;  ///< bytes of shared memory, the last of `rests` too
  int rows;                                   ///< of a block's own side
  int depth;                                  ///< channels of a tile
  bool resident;                              ///< a block of threads makes both gradients of its keys
};

/// What kernels are asked for.
struct BackwardKind {
  int depth;  ///< padded head size: 64, 128 or 256; d_v may be 512 in the latter
  Tiling tiling;
};

BackwardKernels backward_kernels_float16(BackwardKind kind);
BackwardKernels backward_kernels_bfloat16(BackwardKind kind);
BackwardKernels backward_kernels_float32(BackwardKind kind);
BackwardKernels backward_kernels_float64(BackwardKind kind);

}  // namespace anyflash::cuda
