#include "cuda/hopper/backward_kernels.cuh"

namespace anyflash::cuda {

GroupBackwardKernels group_backward_kernels_bfloat16(int depth, bool general) {
  return group_backward_kernels_of<__nv_bfloat16>(depth, general);
}

}  // namespace anyflash::cuda
