#include "cuda/hopper/backward_kernels.h"
#include "cuda/hopper/backward_pieces.cuh"

namespace anyflash::cuda {
namespace {

__global__ void __launch_bounds__(PieceBackwardBlock<float>::kThreads, 1)
    piece_backward_kernel(const __grid_constant__ GroupBackwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  PieceBackwardBlock<float>(args, *reinterpret_cast<PieceBackwardShared*>(memory)).run();
#else
  __trap();  // the host asks no other GPU for it
#endif
}

}  // namespace

GroupBackwardKernels group_backward_kernels_float32() {
  static_assert(sizeof(PieceBackwardShared) <= 227 << 10, "more shared memory than a block of threads can have");
  return {reinterpret_cast<const void*>(&prepare_piece_rows),
          reinterpret_cast<const void*>(&piece_backward_kernel),
          reinterpret_cast<const void*>(&store_piece_query_gradients),
          nullptr,
          PieceBackwardBlock<float>::kThreads,
          static_cast<int>(sizeof(PieceBackwardShared)),
          2};
}

}  // namespace anyflash::cuda
