// The forward kernels by element type, head size and kind of scores. One file compiles those of each type.
#pragma once

#include "cuda/portable/tuning.h"

namespace anyflash::cuda {

struct ForwardKernel {
  const void* function;
  int rows, values;  ///< queries of a thread block, and channels of v
  int threads, shared_bytes;
};

/// The choice of a kernel.
struct ForwardKind {
  int depth;  ///< padded head size: 64, 128 or 256
  Tiling tiling;
  bool general;  ///< scores may need more than a positive scale; always true for small tiles
};

ForwardKernel forward_kernel_float16(ForwardKind kind);
ForwardKernel forward_kernel_bfloat16(ForwardKind kind);
ForwardKernel forward_kernel_float32(ForwardKind kind);
ForwardKernel forward_kernel_float64(ForwardKind kind);

}  // namespace anyflash::cuda
