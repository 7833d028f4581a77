// Hopper's backward kernel, and the table of those of one element type.
#pragma once

#include "cuda/hopper/backward.cuh"
#include "cuda/hopper/backward_kernels.h"
#include "cuda/hopper/backward_prepare.cuh"
#include "cuda/hopper/backward_sums.cuh"
#include "cuda/hopper/backward_wide.cuh"
#include "cuda/hopper/kernel.cuh"

namespace anyflash::cuda {

template <class Block>
GroupBackwardKernels group_backward_kernels_of() {
  using Sizes = typename Block::Sizes;
  return {reinterpret_cast<const void*>(&prepare_rows<typename Sizes::Element, Sizes::kDepth>),
          group_kernel_of<Block, GroupBackwardArgs>(),
          reinterpret_cast<const void*>(&store_query_gradients<typename Sizes::Element, Sizes::kDepth>),
          reinterpret_cast<const void*>(&store_bias_sums<typename Sizes::Element>),
          Block::kThreads,
          shared_bytes<Block>(),
          Sizes::kKeys / 64};
}

template <class E, ScoreKind kind>
GroupBackwardKernels group_backward_kernels_of(int depth) {
  if (depth == 64) return group_backward_kernels_of<GroupBackwardBlock<GroupBackwardSizes<E, 64, 128, kind>>>();
  if (depth == 128) return group_backward_kernels_of<GroupBackwardBlock<GroupBackwardSizes<E, 128, 64, kind>>>();
  return group_backward_kernels_of<WideBackwardBlock<WideBackwardSizes<E, kind>>>();
}

template <ElementType type>
GroupBackwardKernels group_backward_kernels(int depth, ScoreKind kind) {
  using E = NumberOf16<type>;
  return kind == ScoreKind::scaled     ? group_backward_kernels_of<E, ScoreKind::scaled>(depth)
         : kind == ScoreKind::finished ? group_backward_kernels_of<E, ScoreKind::finished>(depth)
                                       : group_backward_kernels_of<E, ScoreKind::any>(depth);
}

}  // namespace anyflash::cuda
