#include "cuda/portable/backward_kernels.cuh"

namespace anyflash::cuda {

BackwardKernels backward_kernels_float16(BackwardKind kind) { return backward_kernels_of<__half>(kind); }

}  // namespace anyflash::cuda
