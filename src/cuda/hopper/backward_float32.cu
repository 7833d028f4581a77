#include "cuda/hopper/backward_kernels.h"
#include "cuda/hopper/backward_piece_rows.cuh"
#include "cuda/hopper/backward_pieces.cuh"
#include "cuda/hopper/backward_pieces_wide.cuh"

namespace anyflash::cuda {
namespace {

template <class Block>
__global__ void __launch_bounds__(Block::kThreads, 1)
    piece_backward_kernel(const __grid_constant__ GroupBackwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run();
#else
  __trap();  // the host asks no other GPU for it
#endif
}

template <class Block, int kDepth>
GroupBackwardKernels piece_backward_kernels() {
  static_assert(sizeof(typename Block::Shared) <= 227 << 10, "more shared memory than a block of threads can have");
  return {reinterpret_cast<const void*>(&prepare_piece_rows<kDepth>),
          reinterpret_cast<const void*>(&piece_backward_kernel<Block>),
          reinterpret_cast<const void*>(&store_piece_query_gradients<kDepth>),
          nullptr,
          Block::kThreads,
          static_cast<int>(sizeof(typename Block::Shared)),
          Block::kKeyBlocks};
}

}  // namespace

GroupBackwardKernels group_backward_kernels_float32(int depth) {
  if (depth == 64) return piece_backward_kernels<PieceBackwardBlock<float>, 64>();
  return piece_backward_kernels<WidePieceBackwardBlock<float>, 128>();
}

}  // namespace anyflash::cuda
