// Hopper's forward kernel, and the table of those of one element type.
#pragma once

#include "cuda/hopper/forward.cuh"
#include "cuda/hopper/forward_kernels.h"

namespace anyflash::cuda {

template <class Block>
__global__ void __launch_bounds__(Block::Sizes::kThreads, 1)
    group_forward_kernel(const __grid_constant__ GroupForwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run();
#else
  __trap();  // the host asks no other GPU for it
#endif
}

template <class Sizes>
GroupForwardKernel group_forward_kernel_of() {
  using Block = GroupForwardBlock<Sizes>;
  static_assert(sizeof(typename Block::Shared) <= 227 << 10, "more shared memory than a block of threads can have");
  return {reinterpret_cast<const void*>(&group_forward_kernel<Block>), Sizes::kThreads,
          static_cast<int>(sizeof(typename Block::Shared)), Sizes::kBlocks, Sizes::kBiasBytes};
}

// Query blocks of a task, stages, registers, bytes of a bias. docs/design-log.md has the figures.
template <class E, bool kGeneral>
GroupForwardKernel group_forward_kernel_of(int depth) {
  constexpr bool g = kGeneral;
  if constexpr (std::is_same_v<E, float>) {
    if (depth == 64) return group_forward_kernel_of<GroupForwardSizes<E, 64, g, 2, g ? 2 : 3, 232, 40, 4>>();
    return group_forward_kernel_of<GroupForwardSizes<E, 128, g, 2, 1, 232, 40, 4>>();
  } else {
    if (depth == 64) return group_forward_kernel_of<GroupForwardSizes<E, 64, g, 3, g ? 2 : 6, 152, 56, 4>>();
    if (depth == 128) return group_forward_kernel_of<GroupForwardSizes<E, 128, g, 2, g ? 2 : 4, 232, 40, 4>>();
    return group_forward_kernel_of<GroupForwardSizes<E, 256, g, 2, 2, 232, 40, 2>>();
  }
}

template <class E>
GroupForwardKernel group_forward_kernel_of(int depth, bool general) {
  return general ? group_forward_kernel_of<E, true>(depth) : group_forward_kernel_of<E, false>(depth);
}

}  // namespace anyflash::cuda
