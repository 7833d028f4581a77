#include "cuda/hopper/forward_kernels.cuh"

namespace anyflash::cuda {

GroupForwardKernel group_forward_kernel_float16(int depth, bool general) {
  return group_forward_kernel_of<__half>(depth, general);
}

}  // namespace anyflash::cuda
