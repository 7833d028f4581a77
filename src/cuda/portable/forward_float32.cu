#include "cuda/portable/forward_kernels.cuh"

namespace anyflash::cuda {

ForwardKernel forward_kernel_float32(ForwardKind kind) { return forward_kernel_of<float>(kind); }

}  // namespace anyflash::cuda
