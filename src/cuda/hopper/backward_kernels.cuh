// The table of Hopper's backward kernels of one element type.
#pragma once

#include "cuda/hopper/backward.cuh"
#include "cuda/hopper/backward_kernels.h"
#include "cuda/hopper/backward_sums.cuh"

namespace anyflash::cuda {

template <class E, int kDepth, int kQueries>
GroupBackwardKernels group_backward_kernels_of() {
  using Sizes = GroupBackwardSizes<E, kDepth, kQueries>;
  return {reinterpret_cast<const void*>(&group_backward_kernel<Sizes>),
          reinterpret_cast<const void*>(&store_query_gradients<E, kDepth>), Sizes::kThreads,
          static_cast<int>(sizeof(GroupBackwardShared<Sizes>))};
}

template <class E>
GroupBackwardKernels group_backward_kernels_of(int depth) {
  return depth == 64 ? group_backward_kernels_of<E, 64, 128>() : group_backward_kernels_of<E, 128, 64>();
}

}  // namespace anyflash::cuda
