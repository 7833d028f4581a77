#include "cuda/portable/forward_kernels.cuh"

namespace anyflash::cuda {

ForwardKernel forward_kernel_float64(ForwardKind kind) { return forward_kernel_of<double>(kind); }

}  // namespace anyflash::cuda
