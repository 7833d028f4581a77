#include "cuda/portable/forward_kernels.cuh"

namespace anyflash::cuda {

ForwardKernel forward_kernel_float16(ForwardKind kind) { return forward_kernel_of<__half>(kind); }

}  // namespace anyflash::cuda
