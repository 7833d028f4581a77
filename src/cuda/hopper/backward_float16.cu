#include "cuda/hopper/backward_kernels.cuh"

namespace anyflash::cuda {

GroupBackwardKernels group_backward_kernels_float16(int depth, ScoreKind kind) {
  return group_backward_kernels_of<__half>(depth, kind);
}

}  // namespace anyflash::cuda
