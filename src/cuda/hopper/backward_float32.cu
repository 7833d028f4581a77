#include "cuda/hopper/backward_kernels.h"
#include "cuda/hopper/backward_piece_rows.cuh"
#include "cuda/hopper/backward_pieces.cuh"
#include "cuda/hopper/backward_pieces_wide.cuh"
#include "cuda/hopper/kernel.cuh"

namespace anyflash::cuda {
namespace {

template <class Block, int kDepth>
GroupBackwardKernels piece_backward_kernels() {
  return {reinterpret_cast<const void*>(&prepare_piece_rows<kDepth>),
          group_kernel_of<Block, GroupBackwardArgs>(),
          reinterpret_cast<const void*>(&store_piece_query_gradients<kDepth>),
          nullptr,
          Block::kThreads,
          shared_bytes<Block>(),
          Block::kKeyBlocks};
}

}  // namespace

GroupBackwardKernels group_backward_kernels_float32(int depth) {
  if (depth == 64) return piece_backward_kernels<PieceBackwardBlock<float>, 64>();
  return piece_backward_kernels<WidePieceBackwardBlock<float>, 128>();
}

}  // namespace anyflash::cuda
