// The backward kernels by element type, head size and tiling. One file compiles those of each type.
#pragma once

#include "cuda/portable/tuning.h"

namespace anyflash::cuda {

struct BackwardKernels {
  const void *terms, *lse_remainders, *gradients;  ///< row terms; lse remainders (rarely needed); all gradients
  int threads, terms_bytes, gradients_bytes;       ///< shared memory; gradients_bytes holds for `lse_remainders` too
  int rows;                                        ///< of a thread block's own side
  int depth;                                       ///< channels of a tile
  bool resident;                                   ///< one thread block computes both gradients of its keys
};

/// The choice of a kernel.
struct BackwardKind {
  int depth;  ///< padded head size: 64, 128 or 256; with 256, d_v may be 512
  Tiling tiling;
};

BackwardKernels backward_kernels_float16(BackwardKind kind);
BackwardKernels backward_kernels_bfloat16(BackwardKind kind);
BackwardKernels backward_kernels_float32(BackwardKind kind);
BackwardKernels backward_kernels_float64(BackwardKind kind);

}  // namespace anyflash::cuda
