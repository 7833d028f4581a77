// Mask words of the tiles that have none in the plan's tables. Hopper's kernels copy words and cannot evaluate a mask
// program themselves: setmaxnreg divides the registers between their warpgroups, which leaves none for calls. A mask is
// evaluated once for all heads.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/device_masks.h"

namespace anyflash::cuda {

struct WordArgs {
  const DeviceGroup* groups;
  rules::Grid query_grid, key_grid;
  std::int32_t blocks;   ///< of the side with a word for each entry
  bool of_queries;       ///< which side that is
  std::uint64_t* words;  ///< one for each row of each tile, by the tile number in its run
  /// For masks found on the GPU: how many tiles have numbers, for how many there is room, and a flag that becomes 1 if
  /// there is not enough. Then no words are evaluated.
  const unsigned long long* numbered;
  std::int64_t most_tiles;
  std::int32_t* too_many;
  RaggedMask ragged;
};

/// Queues the kernel on the stream. groups: masks of the plan.
void ask_all_words(const WordArgs& args, std::int64_t groups, cudaStream_t stream);

}  // namespace anyflash::cuda
