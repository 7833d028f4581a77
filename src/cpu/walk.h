// The order in which blocks are taken, and which of them a thread keeps: the ones that it loaded last, since its next
// tasks mostly visit them again.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "cpu/tuning.h"
#include "plan/plan.h"

namespace anyflash::cpu {

/// Block i of a walk over the query blocks in strips a few blocks wide. So in two and three dimensions the key blocks
/// around a strip are still packed when the next row of blocks comes. Where blocks take every s-th entry, the s blocks
/// of one stretch follow each other: together they read it whole.
inline std::int32_t walked(const Grid& grid, std::int64_t i) {
  using tuning::kStrip;
  const std::int64_t across = grid.blocks(2), down = std::int64_t{grid.blocks(0)} * grid.blocks(1);
  const auto first = i / (down * kStrip) * kStrip, width = std::min(kStrip, across - first), rest = i - first * down;
  const auto column = first + rest % width, step = std::int64_t{grid.step[2]};
  return static_cast<std::int32_t>(rest / width * across + column % step * grid.chunks(2) + column / step);
}

/// The blocks first .. end - 1.
struct BlockRange {
  std::int32_t first, end;

  std::int64_t count() const { return end - first; }
};

/// Chunk `i` of `chunks` nearly equal ranges of blocks.
inline BlockRange chunk_of(std::int64_t blocks, std::int64_t chunks, std::int64_t i) {
  return {static_cast<std::int32_t>(i * blocks / chunks), static_cast<std::int32_t>((i + 1) * blocks / chunks)};
}

/// Whether a query block of one range visits a key block of another.
inline bool meet(const RunList& keys_of_query_block, const BlockRange& queries, const BlockRange& keys) {
  const auto& [start, runs] = keys_of_query_block;
  for (auto block = queries.first; block < queries.end; ++block) {
    const auto* const end = runs.data() + start[block + 1];
    const auto* const run = std::partition_point(runs.data() + start[block], end,
                                                 [&](const Run& one) { return one.first + one.count <= keys.first; });
    if (run != end && run->first < keys.end) return true;
  }
  return false;
}

/// The number of chunks that are walked: at least one, and none without a block.
inline std::int64_t chunks_of(std::int64_t wanted, std::int64_t blocks) {
  return std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(blocks, 1));
}

/// The ids of the blocks in a ring of `count` slots.
class KeptBlocks {
 public:
  static constexpr std::int64_t most = 128;

  explicit KeptBlocks(std::int64_t count) : count_(count) { std::fill_n(names_.begin(), count, -1); }
  std::int64_t count() const { return count_; }

  /// The slot that holds a block, or -1.
  std::int64_t find(std::int64_t name) const {
    const auto at = std::find(names_.begin(), names_.begin() + count_, name);
    return at == names_.begin() + count_ ? -1 : at - names_.begin();
  }
  /// Assigns a slot to a block that is loaded now: the oldest, or the next one if the oldest is slot `held`.
  std::int64_t put(std::int64_t name, std::int64_t held = -1) {
    const auto slot = next_ == held ? (next_ + 1) % count_ : next_;
    names_[slot] = name;
    next_ = (slot + 1) % count_;
    return slot;
  }

 private:
  std::array<std::int64_t, most> names_;
  std::int64_t count_, next_ = 0;
};

}  // namespace anyflash::cpu
