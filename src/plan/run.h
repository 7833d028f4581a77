// A run of blocks: what kernels walk, on any device.
#pragma once

#include <cstdint>

#include "rules/program.h"

namespace anyflash {

/// Blocks first .. first + count - 1 are visited; all pairs of each are visible (full) or some may not be (partial).
/// A block of keys with padding (entries beyond the sequence, or beyond the batch entry's key length) is never in a
/// full run, so that a word hides the padding. A block of queries with padding may be in one in a forward plan, where
/// the padding rows' results are not stored; in a backward plan it is not. Blocks without any entry are in no run.
struct Run {
  std::int32_t first, count;
  rules::TileClass kind;
};

}  // namespace anyflash
