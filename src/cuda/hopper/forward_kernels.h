// Hopper's forward kernels by element type and head size. One file compiles those of each type.
#pragma once

namespace anyflash::cuda {

struct GroupForwardKernel {
  const void* function;
  int threads, bytes;  ///< of a block; shared memory
  int blocks;          ///< query blocks of a task
  int bias_bytes;      ///< of the largest type of a bias that it takes
};

/// general: scores may need more than a positive scale.
GroupForwardKernel group_forward_kernel_float16(int depth, bool general);
GroupForwardKernel group_forward_kernel_bfloat16(int depth, bool general);
GroupForwardKernel group_forward_kernel_float32(int depth, bool general, int bf16_terms);  ///< up to 128 channels

}  // namespace anyflash::cuda
