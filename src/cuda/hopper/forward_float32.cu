#include "cuda/hopper/forward_kernels.cuh"

namespace anyflash::cuda {

GroupForwardKernel group_forward_kernel_float32(int depth, bool general) {
  return group_forward_kernel_of<float>(depth, general);
}

}  // namespace anyflash::cuda
