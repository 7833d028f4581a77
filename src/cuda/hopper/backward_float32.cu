#include "cuda/hopper/backward_kernels.h"
#include "cuda/hopper/backward_split.cuh"
#include "cuda/hopper/backward_split_rows.cuh"
#include "cuda/hopper/backward_split_wide.cuh"
#include "cuda/hopper/kernel.cuh"

namespace anyflash::cuda {
namespace {

template <class Block, int kDepth>
GroupBackwardKernels split_backward_kernels() {
  return {reinterpret_cast<const void*>(&prepare_split_rows<kDepth>),
          group_kernel_of<Block, GroupBackwardArgs>(),
          reinterpret_cast<const void*>(&store_split_query_gradients<kDepth>),
          nullptr,
          Block::kThreads,
          shared_bytes<Block>(),
          Block::kKeyBlocks};
}

template <int bf16_terms>
GroupBackwardKernels split_backward_kernels(int depth) {
  if (depth == 64) return split_backward_kernels<SplitBackwardBlock<bf16_terms>, 64>();
  return split_backward_kernels<WideSplitBackwardBlock<bf16_terms>, 128>();
}

}  // namespace

GroupBackwardKernels group_backward_kernels_float32(int depth, int bf16_terms) {
  return bf16_terms == kBf16Terms ? split_backward_kernels<kBf16Terms>(depth)
                                  : split_backward_kernels<kTf32Terms>(depth);
}

}  // namespace anyflash::cuda
