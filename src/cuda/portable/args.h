// Kernel arguments for tensors and plans: plain numbers and device pointers, passed by value.
#pragma once

#include <cstdint>

#include "rules/program.h"

namespace anyflash::cuda {

/// Rows of q, k, v, out or a gradient. Strides in elements. vectors: a row's channels are contiguous, and every row
/// begins on a multiple of 16 bytes.
struct Rows {
  char* data;
  std::int64_t batch, head, channel, sequence[3];
  bool vectors;
};

/// A number for each (batch, head, ...), of any floating-point type. type: its number in ElementType; data null: not
/// given.
struct Numbers {
  char* data;
  std::int32_t type;
  std::int64_t batch, head, query, key;
};

/// A run of blocks. words: the index of the tile's mask words in the list's table, for a single partial block. A
/// negative number means that the words are in no table and the mask program has to be evaluated. It is ~n, where n
/// counts these tiles of one side's blocks.
struct DeviceRun {
  std::int32_t first, count;
  rules::TileClass kind;
  std::int32_t words;
};

/// The runs of each block of one side, as in RunList.
struct DeviceRuns {
  const std::int64_t* start;
  const DeviceRun* runs;
  const std::uint64_t* words;  ///< (tiles, rows of a block)
};

/// What the non-finite fallback, the portable kernel, has to compute again after a Hopper kernel.
enum : std::int32_t { kAllAgain = 1, kBlocksAgain = 2 };  ///< kBlocksAgain: only the query blocks listed in only_blocks

/// A mask of the plan in device memory.
struct DeviceGroup {
  const rules::Program* program;
  DeviceRuns keys_of_query_block;
  DeviceRuns queries_of_key_block;  ///< in a backward plan only
};

}  // namespace anyflash::cuda
