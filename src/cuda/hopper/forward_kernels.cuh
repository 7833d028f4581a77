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

// Query blocks of a task, stages, registers, bytes of a bias. docs/notes/hopper-16bit.md has the figures.
template <class E, int kParts, bool kGeneral>
GroupForwardKernel group_forward_kernel_of(int depth) {
  constexpr bool g = kGeneral;
  if constexpr (kParts > 1) {
    constexpr int wide_stages = kParts == kBf16Terms || g ? 1 : 2;
    if (depth == 64) return group_forward_kernel_of<GroupForwardSizes<E, kParts, 64, g, 2, g ? 2 : 3, 232, 40, 4>>();
    return group_forward_kernel_of<GroupForwardSizes<E, kParts, 128, g, 2, wide_stages, 232, 40, 4>>();
  } else {
    if (depth == 64) return group_forward_kernel_of<GroupForwardSizes<E, 1, 64, g, 3, g ? 2 : 6, 152, 56, 4>>();
    if (depth == 128) return group_forward_kernel_of<GroupForwardSizes<E, 1, 128, g, 2, g ? 2 : 4, 232, 40, 4>>();
    return group_forward_kernel_of<GroupForwardSizes<E, 1, 256, g, 2, 2, 232, 40, 2>>();
  }
}

template <class E, int kParts = 1>
GroupForwardKernel group_forward_kernel_of(int depth, bool general) {
  return general ? group_forward_kernel_of<E, kParts, true>(depth) : group_forward_kernel_of<E, kParts, false>(depth);
}

}  // namespace anyflash::cuda
