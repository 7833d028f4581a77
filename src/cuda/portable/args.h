// What kernels are given of tensors and plans: plain numbers and device pointers, passed by value.
#pragma once

#include <cstdint>

#include "rules/program.h"

namespace anyflash::cuda {

/// Rows of q, k, v, out or a gradient. Strides in elements. vectors: channels are neighbours and every row begins on 16
/// bytes.
struct Rows {
  char* data;
  std::int64_t batch, head, channel, sequence[3];
  bool vectors;
};

/// A number for each (batch, head, ...), any floating-point type by its number in ElementType; data null: none.
struct Numbers {
  char* data;
  std::int32_t type;
  std::int64_t batch, head, query, key;
};

/// A run of blocks. words: of a single partial block, the number of the tile in the list's table that holds its words;
/// negative where the program has to be asked: ~ a number that those tiles of a side's blocks have, counted upwards.
struct DeviceRun {
  std::int32_t first, count;
  rules::TileClass kind;
  std::int32_t words;
};

/// The runs of each block of one side, as a RunList.
struct DeviceRuns {
  const std::int64_t* start;
  const DeviceRun* runs;
  const std::uint64_t* words;  ///< (tiles, rows of a block)
};

/// What a Hopper kernel leaves to the portable one, which makes it again, with care.
enum : std::int32_t { kAllAgain = 1, kBlocksAgain = 2 };  ///< kBlocksAgain: the query blocks that are noted beside

/// A mask of the plan in device memory.
struct DeviceGroup {
  const rules::Program* program;
  DeviceRuns keys_of_query_block;
  DeviceRuns queries_of_key_block;  ///< of a backward plan
};

}  // namespace anyflash::cuda
