#include "cuda/hopper/backward_kernels.cuh"

namespace anyflash::cuda {
template GroupBackwardKernels group_backward_kernels<ElementType::float16>(int, ScoreKind);
}
