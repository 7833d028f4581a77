// The table of attention.cuh's kernels of one element type. docs/notes/hopper-forward.md has the figures.
#pragma once

#include "cuda/hopper/attention.cuh"
#include "cuda/hopper/attention_kernels.h"
#include "cuda/hopper/kernel.cuh"

namespace anyflash::cuda {

template <class E, int kHeadSize, int kKeys, int kWarpgroups, int kStages, int kQueryStages, ScoreModKind kScore>
AttentionKernel attention_kernel_of() {
  using Traits = AttentionTraits<E, kHeadSize, kKeys, kWarpgroups, kStages, kQueryStages, kScore>;
  using Block = Attention<Traits>;
  return {group_kernel_of<Block, AttentionArgs>(),
          Block::kThreads,
          shared_bytes<Block>(),
          kKeys,
          kWarpgroups,
          Traits::kBiasBytes};
}

template <class E>
AttentionKernel attention_kernel_of(int head_size, bool general, bool ragged) {
  constexpr auto scale = ScoreModKind::scale, any = ScoreModKind::general;
  if (head_size == 64)
    return general  ? attention_kernel_of<E, 64, 64, 3, 2, 2, any>()
           : ragged ? attention_kernel_of<E, 64, 128, 2, 3, 2, scale>()
                    : attention_kernel_of<E, 64, 128, 3, 3, 2, scale>();
  if (head_size == 128)
    return general ? attention_kernel_of<E, 128, 64, 2, 2, 2, any>()
                   : attention_kernel_of<E, 128, 128, 2, 2, 2, scale>();
  return general ? attention_kernel_of<E, 256, 64, 2, 2, 1, any>() : attention_kernel_of<E, 256, 64, 2, 2, 1, scale>();
}

}  // namespace anyflash::cuda
