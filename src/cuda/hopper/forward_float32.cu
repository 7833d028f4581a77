#include "cuda/hopper/forward_kernels.cuh"

namespace anyflash::cuda {

GroupForwardKernel group_forward_kernel_float32(int depth, bool general, int pieces) {
  return pieces == kPieces ? group_forward_kernel_of<float, kPieces>(depth, general)
                           : group_forward_kernel_of<float, kTf32Pieces>(depth, general);
}

}  // namespace anyflash::cuda
