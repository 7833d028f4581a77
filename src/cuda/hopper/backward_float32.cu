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

template <int pieces>
GroupBackwardKernels piece_backward_kernels(int depth) {
  if (depth == 64) return piece_backward_kernels<PieceBackwardBlock<pieces>, 64>();
  return piece_backward_kernels<WidePieceBackwardBlock<pieces>, 128>();
}

}  // namespace

GroupBackwardKernels group_backward_kernels_float32(int depth, int pieces) {
  return pieces == kPieces ? piece_backward_kernels<kPieces>(depth) : piece_backward_kernels<kTf32Pieces>(depth);
}

}  // namespace anyflash::cuda
