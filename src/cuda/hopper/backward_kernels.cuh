// Hopper's backward kernel, and the table of those of one element type.
#pragma once

#include "cuda/hopper/backward.cuh"
#include "cuda/hopper/backward_kernels.h"
#include "cuda/hopper/backward_prepare.cuh"
#include "cuda/hopper/backward_sums.cuh"
#include "cuda/hopper/backward_wide.cuh"

namespace anyflash::cuda {

template <class Block>
__global__ void __launch_bounds__(Block::Sizes::kThreads, 1)
    group_backward_kernel(const __grid_constant__ GroupBackwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run();
#else
  __trap();  // the host asks no other GPU for it
#endif
}

template <class Block>
GroupBackwardKernels group_backward_kernels_of() {
  using Sizes = typename Block::Sizes;
  static_assert(sizeof(typename Block::Shared) <= 227 << 10, "more shared memory than a block of threads can have");
  return {reinterpret_cast<const void*>(&prepare_rows<typename Sizes::Element, Sizes::kDepth>),
          reinterpret_cast<const void*>(&group_backward_kernel<Block>),
          reinterpret_cast<const void*>(&store_query_gradients<typename Sizes::Element, Sizes::kDepth>),
          reinterpret_cast<const void*>(&store_bias_sums<typename Sizes::Element>),
          Sizes::kThreads,
          static_cast<int>(sizeof(typename Block::Shared)),
          Sizes::kKeys / 64};
}

template <class E, ScoreKind kind>
GroupBackwardKernels group_backward_kernels_of(int depth) {
  if (depth == 64) return group_backward_kernels_of<GroupBackwardBlock<GroupBackwardSizes<E, 64, 128, kind>>>();
  if (depth == 128) return group_backward_kernels_of<GroupBackwardBlock<GroupBackwardSizes<E, 128, 64, kind>>>();
  return group_backward_kernels_of<WideBackwardBlock<WideBackwardSizes<E, kind>>>();
}

template <class E>
GroupBackwardKernels group_backward_kernels_of(int depth, ScoreKind kind) {
  return kind == ScoreKind::scaled     ? group_backward_kernels_of<E, ScoreKind::scaled>(depth)
         : kind == ScoreKind::finished ? group_backward_kernels_of<E, ScoreKind::finished>(depth)
                                       : group_backward_kernels_of<E, ScoreKind::any>(depth);
}

}  // namespace anyflash::cuda
