// What a tile computes of a query chunk and a key chunk: steps, which are rectangles of rows and neighbouring keys. Blocks
// that the rule hides are left out; blocks with the same visible keys are joined into one step.
#pragma once

#include <algorithm>
#include <vector>

#include "tile_machine/mapping.h"

namespace anyflash::simulator {

class Steps {
 public:
  Steps(const Order& queries, const Order& keys) : queries_(queries), keys_(keys) {}

  /// Calls f(rows, keys, partial) for each step; partial: some of its pairs are hidden.
  template <typename F>
  void of(const MaskGroup& mask, Range rows, Range keys, const F& f) {
    spans_.clear();
    Range joined{rows.first, rows.first};
    bool partial = false;
    const auto flush = [&] {
      for (const auto& span : spans_) f(joined, span, partial);
    };
    for (auto block = queries_.block_of(rows.first); joined.end < rows.end; ++block) {
      const auto end = std::min(rows.end, queries_.start(block + 1));
      const bool some_hidden = find(mask.keys_of_query_block, block, keys);
      if (found_ != spans_) {
        flush();
        spans_.swap(found_);
        joined.first = joined.end;
        partial = false;
      }
      partial |= some_hidden;
      joined.end = end;
    }
    flush();
  }

 private:
  /// Fills found_ with the visible keys of a query block, and tells whether some pairs of them are hidden.
  bool find(const RunList& list, std::int64_t block, Range keys) {
    found_.clear();
    bool partial = false;
    const auto begin = list.runs.begin() + list.start[block], end = list.runs.begin() + list.start[block + 1];
    const auto first = keys_.block_of(keys.first);
    auto run = std::partition_point(begin, end, [&](const Run& one) { return one.first + one.count <= first; });
    for (; run != end; ++run) {
      const Range span{std::max(keys.first, keys_.start(run->first)),
                       std::min(keys.end, keys_.start(std::int64_t(run->first) + run->count))};
      if (span.first >= keys.end) break;
      if (span.first >= span.end) continue;
      partial |= run->kind == TileClass::partial;
      if (!found_.empty() && found_.back().end == span.first) found_.back().end = span.end;
      else found_.push_back(span);
    }
    return partial;
  }

  const Order &queries_, &keys_;
  std::vector<Range> spans_, found_;
};

}  // namespace anyflash::simulator
