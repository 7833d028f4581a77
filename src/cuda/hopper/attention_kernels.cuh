// The table of attention.cuh's kernels of one element type. docs/notes/hopper-forward.md has the figures.
#pragma once

#include "cuda/hopper/attention.cuh"
#include "cuda/hopper/attention_args.h"
#include "cuda/hopper/kernel.cuh"

namespace anyflash::cuda {

template <class E, int kHeadSize, int kKeys, int kWarpgroups, int kStages, int kQueryStages,
          ScoreModKind kScore = ScoreModKind::scale, int kBlocks = 1, bool kSplit = false>
AttentionKernel attention_kernel_of() {
  using Traits = AttentionTraits<E, kHeadSize, kKeys, kWarpgroups, kStages, kQueryStages, kScore, kBlocks, kSplit>;
  using Block = Attention<Traits>;
  return {group_kernel_of<Block, AttentionArgs, kBlocks>(),
          Block::kThreads,
          shared_bytes<Block>(),
          kKeys,
          kWarpgroups,
          Traits::kBiasBytes,
          kBlocks};
}

template <ElementType type>
AttentionKernel attention_kernel(int head_size, AttentionKind kind) {
  using E = NumberOf16<type>;
  using enum AttentionKind;
  constexpr auto scale = ScoreModKind::scale, any = ScoreModKind::general;
  switch (head_size) {
    case 64:
      return kind == general  ? attention_kernel_of<E, 64, 64, 3, 2, 2, any>()
             : kind == sparse ? attention_kernel_of<E, 64, 64, 1, 3, 2, scale, 3>()
             : kind == split  ? attention_kernel_of<E, 64, 128, 3, 3, 2, scale, 1, true>()
                              : attention_kernel_of<E, 64, 128, 3, 3, 2>();
    case 128:
      return kind == general  ? attention_kernel_of<E, 128, 64, 2, 2, 2, any>()
             : kind == sparse ? attention_kernel_of<E, 128, 64, 1, 2, 2, scale, 2>()
             : kind == split  ? attention_kernel_of<E, 128, 128, 2, 2, 2, scale, 1, true>()
                              : attention_kernel_of<E, 128, 128, 2, 2, 2>();
    default:
      return kind == general ? attention_kernel_of<E, 256, 64, 2, 2, 1, any>()
             : kind == split ? attention_kernel_of<E, 256, 64, 2, 2, 1, scale, 1, true>()
                             : attention_kernel_of<E, 256, 64, 2, 2, 1>();
  }
}

}  // namespace anyflash::cuda
