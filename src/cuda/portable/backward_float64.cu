#include "cuda/portable/backward_kernels.cuh"

namespace anyflash::cuda {

BackwardKernels backward_kernels_float64(BackwardKind kind) { return backward_kernels_of<double>(kind); }

}  // namespace anyflash::cuda
