#include "cuda/hopper/forward_kernels.cuh"

namespace anyflash::cuda {

GroupForwardKernel group_forward_kernel_bfloat16(int depth, bool general) {
  return group_forward_kernel_of<__nv_bfloat16>(depth, general);
}

}  // namespace anyflash::cuda
