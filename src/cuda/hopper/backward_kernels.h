// Hopper's backward kernels by element type and head size. One file compiles those of each type.
#pragma once

namespace anyflash::cuda {

struct GroupBackwardKernels {
  const void *gradients, *store_queries;  ///< dK, dV and the sums of dQ; dQ from its sums
  int threads, bytes;                     ///< of the first; bytes of shared memory
  int key_blocks;                         ///< that a block of threads takes
  int query_blocks;                       ///< that it takes at a time
};

/// general: scores need more than a scale.
GroupBackwardKernels group_backward_kernels_float16(int depth, bool general);
GroupBackwardKernels group_backward_kernels_bfloat16(int depth, bool general);
GroupBackwardKernels group_backward_kernels_float32();  ///< up to 64 channels, scores that need no more than a scale

const void* prepare_rows_kernel();

}  // namespace anyflash::cuda
