// The words of tiles that have none in the plan's tables. Hopper's kernels copy words as they are and cannot ask a
// program themselves: their warpgroups share a multiprocessor's registers by role, and calls do not fit in. A mask is
// asked once for all heads.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/portable/args.h"

namespace anyflash::cuda {

struct WordArgs {
  const DeviceGroup* groups;
  rules::Grid query_grid, key_grid;
  std::int32_t blocks;   ///< of the side that has the words, a word for each entry
  bool of_queries;       ///< which that is
  std::uint64_t* words;  ///< one for each row of each tile, by the number in its run
  /// Of masks that were found on the device: how many tiles have numbers, for how many there is room, and what becomes
  /// 1 if that is less. Then no words are asked for.
  const unsigned long long* numbered;
  std::int64_t most_tiles;
  std::int32_t* too_many;
};

/// Queued on the stream. groups: masks of the plan.
void ask_all_words(const WordArgs& args, std::int64_t groups, cudaStream_t stream);

}  // namespace anyflash::cuda
