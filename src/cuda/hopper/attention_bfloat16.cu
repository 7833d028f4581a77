#include "cuda/hopper/attention_kernels.cuh"

namespace anyflash::cuda {

AttentionKernel attention_kernel_bfloat16(int head_size, bool general, bool ragged) {
  return attention_kernel_of<__nv_bfloat16>(head_size, general, ragged);
}

}  // namespace anyflash::cuda
