#include "cuda/hopper/backward_kernels.cuh"

namespace anyflash::cuda {

GroupBackwardKernels group_backward_kernels_bfloat16(int depth, ScoreKind kind) {
  return group_backward_kernels_of<__nv_bfloat16>(depth, kind);
}

}  // namespace anyflash::cuda
