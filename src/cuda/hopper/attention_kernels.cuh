// The table of attention.cuh's kernels of one element type. docs/notes/hopper-forward.md has the figures.
#pragma once

#include "cuda/hopper/attention.cuh"
#include "cuda/hopper/attention_args.h"
#include "cuda/hopper/kernel.cuh"

namespace anyflash::cuda {

template <class E, int kHeadSize, int kKeys, int kWarpgroups, int kStages, int kQueryStages, bool kOrdered = true,
          ScoreModKind kScore = ScoreModKind::scale>
AttentionKernel attention_kernel_of() {
  using Traits = AttentionTraits<E, kHeadSize, kKeys, kWarpgroups, kStages, kQueryStages, kScore, kOrdered>;
  using Block = Attention<Traits>;
  return {group_kernel_of<Block, AttentionArgs>(),
          Block::kThreads,
          shared_bytes<Block>(),
          kKeys,
          kWarpgroups,
          Traits::kBiasBytes};
}

template <ElementType type>
AttentionKernel attention_kernel(int head_size, bool general, Visits visits) {
  using E = NumberOf16<type>;
  constexpr auto any = ScoreModKind::general;
  const bool sparse = visits == Visits::sparse;
  switch (head_size) {
    case 64:
      return general                    ? attention_kernel_of<E, 64, 64, 3, 2, 2, true, any>()
             : sparse                   ? attention_kernel_of<E, 64, 64, 3, 6, 2, false>()
             : visits == Visits::ragged ? attention_kernel_of<E, 64, 128, 2, 3, 2>()
                                        : attention_kernel_of<E, 64, 128, 3, 3, 2>();
    case 128:
      return general  ? attention_kernel_of<E, 128, 64, 2, 2, 2, true, any>()
             : sparse ? attention_kernel_of<E, 128, 64, 2, 4, 2, false>()
                      : attention_kernel_of<E, 128, 128, 2, 2, 2>();
    default:
      return general ? attention_kernel_of<E, 256, 64, 2, 2, 1, true, any>()
                     : attention_kernel_of<E, 256, 64, 2, 2, 1>();
  }
}

}  // namespace anyflash::cuda
