// What a tile computes of a query chunk and a key chunk: steps, which are rectangles of rows and neighbouring keys. Blocks
// that the rule hides are left out, and of blocks at the ends what no row of a band sees. Bands with the same visible keys
// are joined into one step; others where one step costs less than two.
#pragma once

#include <algorithm>
#include <vector>

#include "tile_machine/cost.h"

namespace anyflash::simulator {

class Steps {
 public:
  Steps(const Call& call, const Cost& cost) : call_(call), cost_(cost) {}

  /// Calls f(rows, keys, partial) for each step; partial: some of its pairs are hidden.
  template <typename F>
  void of(const MaskGroup& mask, Range rows, Range keys, const F& f) {
    const auto* const hulls = call_.hulls_of(mask);
    joined_ = {{rows.first, rows.first}, {}, false};
    for (auto block = call_.queries.block_of(rows.first); joined_.rows.end < rows.end; ++block) {
      const auto first = call_.queries.start(block), end = std::min(rows.end, call_.queries.start(block + 1));
      found_.partial = find(mask.keys_of_query_block, block, keys);
      if (!hulls || !found_.partial) {
        take(found_, end, f);
        continue;
      }
      for (auto band = (joined_.rows.end - first) / Hulls::band_rows; joined_.rows.end < end; ++band) {
        trim(hulls->of(block, band));
        take(trimmed_, std::min(end, first + (band + 1) * Hulls::band_rows), f);
      }
    }
    flush(f);
  }

 private:
  struct Band {
    Range rows;
    std::vector<Range> spans;
    bool partial;
  };

  /// Adds the rows up to `end`, which see the keys of `band`.
  template <typename F>
  void take(Band& band, std::int64_t end, const F& f) {
    band.rows = {joined_.rows.end, end};
    if (band.spans == joined_.spans) {
      joined_.partial |= band.partial;
    } else if (one_is_cheaper(band)) {
      auto& span = joined_.spans.front();
      span = {std::min(span.first, band.spans.front().first), std::max(span.end, band.spans.front().end)};
      joined_.partial = true;
    } else {
      flush(f);
      joined_.rows.first = joined_.rows.end;
      joined_.spans.swap(band.spans);
      joined_.partial = band.partial;
    }
    joined_.rows.end = end;
  }

  bool one_is_cheaper(const Band& band) const {
    if (band.spans.size() != 1 || joined_.spans.size() != 1) return false;
    const auto &a = joined_.spans.front(), &b = band.spans.front();
    const auto both = std::max(a.end, b.end) - std::min(a.first, b.first);
    return cost_.step(joined_.rows.size() + band.rows.size(), both, true) <=
           cost_.step(joined_.rows.size(), a.size(), joined_.partial) +
               cost_.step(band.rows.size(), b.size(), band.partial);
  }

  template <typename F>
  void flush(const F& f) const {
    for (const auto& span : joined_.spans) f(joined_.rows, span, joined_.partial);
  }

  /// Fills trimmed_ with what a hull leaves of found_.
  void trim(const Hulls::Hull& hull) {
    trimmed_.partial = found_.partial;
    trimmed_.spans.clear();
    for (const auto& span : found_.spans) {
      const Range kept{std::max(span.first, hull.first), std::min(span.end, hull.end)};
      if (kept.first < kept.end) trimmed_.spans.push_back(kept);
    }
  }

  /// Fills found_ with the visible keys of a query block, and tells whether some pairs of them are hidden.
  bool find(const RunList& list, std::int64_t block, Range keys) {
    auto& spans = found_.spans;
    spans.clear();
    bool partial = false;
    const auto begin = list.runs.begin() + list.start[block], end = list.runs.begin() + list.start[block + 1];
    const auto first = call_.keys.block_of(keys.first);
    auto run = std::partition_point(begin, end, [&](const Run& one) { return one.first + one.count <= first; });
    for (; run != end; ++run) {
      const Range span{std::max(keys.first, call_.keys.start(run->first)),
                       std::min(keys.end, call_.keys.start(std::int64_t(run->first) + run->count))};
      if (span.first >= keys.end) break;
      if (span.first >= span.end) continue;
      partial |= run->kind == TileClass::partial;
      if (!spans.empty() && spans.back().end == span.first) spans.back().end = span.end;
      else spans.push_back(span);
    }
    return partial;
  }

  const Call& call_;
  const Cost cost_;
  Band joined_{}, found_{}, trimmed_{};
};

}  // namespace anyflash::simulator
