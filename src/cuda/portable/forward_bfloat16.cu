#include "cuda/portable/forward_kernels.cuh"

namespace anyflash::cuda {

ForwardKernel forward_kernel_bfloat16(ForwardKind kind) { return forward_kernel_of<__nv_bfloat16>(kind); }

}  // namespace anyflash::cuda
