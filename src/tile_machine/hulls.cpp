#include "tile_machine/hulls.h"

#include <algorithm>
#include <bit>

#include "rules/words.h"
#include "tile_machine/mapping.h"

namespace anyflash::simulator {
namespace {

/// Trims the hulls of a query block's bands by the words of partial blocks at the ends of what it sees.
class Trim {
 public:
  Trim(const MaskGroup& mask, const Order& queries, const Order& keys, std::int64_t block, Hulls::Hull* hulls)
      : mask_(mask), keys_(keys), hulls_(hulls) {
    for (auto row = queries.start(block); row < queries.start(block + 1); ++row)
      rows_.push_back(queries.coordinate(row));
  }

  /// From the first key block on, or from the last one back. False: no band is left to trim.
  bool front(std::int64_t key_block) {
    return trim(key_block, front_, [&](Hulls::Hull& hull, const Range& seen) { hull.first = seen.first; });
  }
  bool back(std::int64_t key_block) {
    return trim(key_block, back_, [&](Hulls::Hull& hull, const Range& seen) { hull.end = seen.end; });
  }

 private:
  template <typename F>
  bool trim(std::int64_t key_block, unsigned& done, const F& set) {
    const Range all{keys_.start(key_block), keys_.start(key_block + 1)};
    rules::WordsOfKeys words(mask_.program, keys_.box(key_block));
    const auto rows = std::int64_t(rows_.size());
    bool some_left = false;
    for (std::int64_t band = 0, first = 0; first < rows; ++band, first += Hulls::band_rows) {
      if (done >> band & 1) continue;
      std::uint64_t bits = 0;
      for (auto row = first; row < std::min(first + Hulls::band_rows, rows); ++row) bits |= words(rows_[row]);
      Range seen{all.end, all.first};  // of a block that it does not see, nothing is kept
      if (keys_.plain() && bits != 0) {
        seen = {all.first + std::countr_zero(bits), all.first + 64 - std::countl_zero(bits)};
      } else if (bits != 0) {
        for (auto key = all.first; key < all.end; ++key)
          if (bits >> keys_.entry(key) & 1) seen = {std::min(seen.first, key), key + 1};
      }
      if (seen.first < seen.end) done |= 1u << band;
      else some_left = true;
      set(hulls_[band], seen);
    }
    return some_left;
  }

  const MaskGroup& mask_;
  const Order& keys_;
  Hulls::Hull* hulls_;
  std::vector<Int3> rows_;
  unsigned front_ = 0, back_ = 0;  // bands that see a key of a block looked at
};

}  // namespace

Hulls::Hulls(const MaskGroup& mask, const Order& queries, const Order& keys) {
  constexpr int looked_at = 2;  // blocks at either end
  const auto& [start, runs] = mask.keys_of_query_block;
  const auto blocks = std::int64_t(start.size()) - 1;
  hulls_.assign(blocks * bands, {0, keys.entries()});
  for (std::int64_t block = 0; block < blocks; ++block) {
    if (start[block] == start[block + 1]) continue;
    Trim trim(mask, queries, keys, block, &hulls_[block * bands]);
    const auto &first = runs[start[block]], &last = runs[start[block + 1] - 1];
    if (first.kind == TileClass::partial) {
      for (int i = 0; i < std::min<int>(looked_at, first.count); ++i)
        if (!trim.front(first.first + i)) break;
    }
    if (last.kind == TileClass::partial) {
      for (int i = 0; i < std::min<int>(looked_at, last.count); ++i)
        if (!trim.back(last.first + last.count - 1 - i)) break;
    }
  }
}

}  // namespace anyflash::simulator
