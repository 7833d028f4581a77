// A run of blocks: the unit that kernels walk, on any device.
#pragma once

#include <cstdint>

#include "rules/program.h"

namespace anyflash {

/// Blocks first .. first + count - 1 are visited; all pairs of each are visible (full) or some may not be (partial).
/// Padding means entries beyond the sequence, or beyond the batch entry's key length. A key block with padding is never
/// in a full run, so that a word hides it. A query block with padding may be in a full run of a forward plan, where the
/// padding rows' results are not stored, but not of a backward plan. Blocks without any entry are in no run.
struct Run {
  std::int32_t first, count;
  rules::TileClass kind;
};

}  // namespace anyflash
