#include "cuda/hopper/forward_kernels.cuh"

namespace anyflash::cuda {

GroupForwardKernel group_forward_kernel_float32(int depth, bool general, int bf16_terms) {
  return bf16_terms == kBf16Terms ? group_forward_kernel_of<float, kBf16Terms>(depth, general)
                                  : group_forward_kernel_of<float, kTf32Terms>(depth, general);
}

}  // namespace anyflash::cuda
