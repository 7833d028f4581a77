#include "cuda/portable/backward_kernels.cuh"

namespace anyflash::cuda {

BackwardKernels backward_kernels_bfloat16(BackwardKind kind) { return backward_kernels_of<__nv_bfloat16>(kind); }

}  // namespace anyflash::cuda
