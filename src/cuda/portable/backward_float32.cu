#include "cuda/portable/backward_kernels.cuh"

namespace anyflash::cuda {

BackwardKernels backward_kernels_float32(BackwardKind kind) { return backward_kernels_of<float>(kind); }

}  // namespace anyflash::cuda
