// The 16-bit forward kernels of Hopper by element type and head size. One file compiles those of each type.
#pragma once

namespace anyflash::cuda {

struct AttentionKernel {
  const void* function;
  int threads, bytes;  ///< of a thread block; shared memory
  int keys, blocks;    ///< of a step; query blocks of a task
  int bias_bytes;      ///< of the largest type of a bias that it takes
};

/// general: scores may need more than a positive scale. ragged: neighbouring query blocks visit other key blocks.
AttentionKernel attention_kernel_float16(int head_size, bool general, bool ragged);
AttentionKernel attention_kernel_bfloat16(int head_size, bool general, bool ragged);

}  // namespace anyflash::cuda
