// Hopper's forward kernel, and the table of those of one element type.
#pragma once

#include "cuda/hopper/forward.cuh"
#include "cuda/hopper/forward_kernels.h"
#include "cuda/hopper/kernel.cuh"

namespace anyflash::cuda {

template <class Sizes>
GroupForwardKernel group_forward_kernel_of() {
  using Block = GroupForwardBlock<Sizes>;
  return {group_kernel_of<Block, GroupForwardArgs>(), Block::kThreads, shared_bytes<Block>(), Sizes::kBlocks,
          Sizes::kBiasBytes};
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
