// The forward kernels by element type, head size and what scores need. One file compiles those of each type.
#pragma once

#include "cuda/portable/tuning.h"

namespace anyflash::cuda {

struct ForwardKernel {
  const void* function;
  int rows, values;  ///< queries of a block of threads, and channels of v
  int threads, shared_bytes;
};

/// What a kernel is asked for.
struct ForwardKind {
  int depth;  ///< padded head size: 64, 128 or 256
  Tiling tiling;
  bool general;  ///< scores may need more than a positive scale; the small tiles' kernels always are
};

ForwardKernel forward_kernel_float16(ForwardKind kind);
ForwardKernel forward_kernel_bfloat16(ForwardKind kind);
ForwardKernel forward_kernel_float32(ForwardKind kind);
ForwardKernel forward_kernel_float64(ForwardKind kind);

}  // namespace anyflash::cuda
