// The order in which chunks take a sequence's entries: that of the plan's blocks, without padding. A chunk is a range of
// positions in it, and keeps the boxes of the plan. In a sequence of one dimension without steps it is the sequence's own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace anyflash::simulator {

class Order {
 public:
  explicit Order(const Grid& grid) : grid_(grid), entries_(rules::volume(grid.size)), blocks_(grid.count()) {
    const auto rows = rules::volume(grid.extent);
    plain_ = rows == block_rows && grid.extent[2] == rows && grid.step[2] == 1 && grid.size[0] * grid.size[1] == 1;
    if (plain_) return;
    flat_.reserve(entries_);
    for (std::int64_t block = 0; block < blocks_; ++block) {
      start_.push_back(std::int64_t(flat_.size()));
      const auto box = grid.box(std::int32_t(block));
      for (std::int32_t e = 0; e < rows; ++e) {
        const auto c = box.entry(e);
        if (!rules::inside(c, grid.size)) continue;
        flat_.push_back(std::int32_t(rules::flat_index(c, grid.size)));
        entry_.push_back(std::uint8_t(e));
      }
    }
    start_.push_back(std::int64_t(flat_.size()));
  }

  std::int64_t entries() const { return entries_; }
  bool plain() const { return plain_; }
  std::int64_t flat(std::int64_t position) const { return plain_ ? position : flat_[position]; }
  Int3 coordinate(std::int64_t position) const { return rules::coordinate_of(flat(position), grid_.size); }
  /// The number of an entry in its block's box.
  int entry(std::int64_t position) const { return plain_ ? int(position % block_rows) : entry_[position]; }
  /// The first position of a block; of the block behind the last one: entries().
  std::int64_t start(std::int64_t block) const {
    return plain_ ? std::min(block * block_rows, entries_) : start_[block];
  }
  std::int64_t block_of(std::int64_t position) const {
    if (plain_) return position / block_rows;
    return std::upper_bound(start_.begin(), start_.end(), position) - start_.begin() - 1;
  }
  Box box(std::int64_t block) const { return grid_.box(std::int32_t(block)); }
  const Int3& size() const { return grid_.size; }

  static constexpr std::int64_t block_rows = 64;

 private:
  Grid grid_;
  std::int64_t entries_, blocks_;
  bool plain_;
  std::vector<std::int64_t> start_;
  std::vector<std::int32_t> flat_;
  std::vector<std::uint8_t> entry_;
};

}  // namespace anyflash::simulator
