// What a split of a sequence over processes needs to know of a rule: the keys that some queries see, and how many.
#include <anyflash/sharding.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>

#include "rules/classes.h"
#include "rules/compile.h"
#include "rules/part.h"

namespace anyflash {
namespace rules {
namespace {

constexpr std::int64_t asked_entries = 2048;      // queries that are asked for together
constexpr std::int64_t most_questions = 1 << 18;  // for more than one sample a block: about 20 ms
constexpr std::size_t most_lengths = 4;           // for which pairs are counted
const Int3 ones{{1, 1, 1}};

/// The shapes of the whole sequences, checked with the rule.
Shapes checked_shapes(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape, Align align) {
  part(rule, q_shape, k_shape, {}, {});  // checks the sizes, and where the tables are
  const auto axes = table_axes(rule);
  Shapes shapes;
  shapes.dimensions = int(q_shape.size());
  shapes.q_size = three(q_shape);
  shapes.k_size = three(k_shape);
  shapes.align = align;
  shapes.batch = axes.batch;
  shapes.heads = axes.heads;
  check(rule, shapes);
  return shapes;
}

/// Can a pair of a query and a key become visible or hidden because there are more keys? The key itself exists.
bool depends_on_length(const Node& node, Align align) {
  if (align != Align::none_front || node.kind == NodeKind::tiles || node.kind == NodeKind::neighbourhood) return true;
  return (node.left && depends_on_length(*node.left, align)) || (node.right && depends_on_length(*node.right, align));
}

/// Of the tables' batch entry, and its keys: the share of the call's batch entries. The longest first: what it marks, the
/// others need not ask.
using Lengths = std::map<std::pair<std::int64_t, std::int64_t>, double, std::greater<>>;

/// Only the longest of each batch entry.
void keep_longest(Lengths& lengths) {
  for (auto at = lengths.begin(); at != lengths.end();) {
    const bool first = at == lengths.begin() || std::prev(at)->first.first != at->first.first;
    at = first ? std::next(at) : lengths.erase(at);
  }
}

/// A few in equal distances, each with the shares of those around it.
void keep_few(Lengths& lengths) {
  const std::vector<Lengths::value_type> every(lengths.begin(), lengths.end());
  if (every.size() <= most_lengths) return;
  lengths.clear();
  for (std::size_t i = 0; i < most_lengths; ++i) {
    const auto first = every.size() * i / most_lengths, end = every.size() * (i + 1) / most_lengths;
    auto& share = lengths[every[(first + end) / 2].first];
    for (auto j = first; j < end; ++j) share += every[j].second;
  }
}

/// The mask of some batch entries and heads.
struct WholeMask {
  Program program;
  std::int64_t keys;  ///< entries of the outermost dimension that exist
  double share;       ///< of the batch entries and heads
};

/// The masks of all batch entries and heads that differ. counted: of a sample of the lengths, for a mean. Else those that
/// show what all show.
class WholeMasks {
 public:
  WholeMasks(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape, Align align,
             const std::vector<std::int64_t>& key_lengths, bool counted = false)
      : shapes(checked_shapes(rule, q_shape, k_shape, align)) {
    if (volume(shapes.q_size) == 0 || volume(shapes.k_size) == 0) return;
    Lengths entries;
    if (key_lengths.empty()) {
      for (std::int64_t b = 0; b < shapes.batch; ++b) entries[{b, k_shape[0]}] = 1.0 / double(shapes.batch);
    } else {
      check_lengths(key_lengths, k_shape);
      for (std::size_t b = 0; b < key_lengths.size(); ++b)
        entries[{shapes.batch > 1 ? b : 0, key_lengths[b]}] += 1.0 / double(key_lengths.size());
      if (counted) {
        keep_few(entries);
      } else if (!depends_on_length(rule.node(), align)) {
        keep_longest(entries);
      }
    }
    for (const auto& [entry, share] : entries) {
      const auto [b, keys] = entry;
      if (keys == 0) continue;
      const auto length = keys < k_shape[0] ? keys : -1;
      for (std::int64_t h = 0; h < shapes.heads; ++h)
        masks.push_back({compile(rule, shapes, b, h, tables_, length), keys, share / double(shapes.heads)});
    }
  }

  int outer() const { return outermost(shapes.dimensions); }

  /// Entries first .. first + count - 1 of the outermost dimension.
  Box slab(Int3 size, std::int64_t first, std::int64_t count) const {
    Box box{{{0, 0, 0}}, size, ones};
    box.origin[outer()] = std::int32_t(first);
    box.extent[outer()] = std::int32_t(count);
    return box;
  }

  Shapes shapes;
  std::vector<WholeMask> masks;

 private:
  void check_lengths(const std::vector<std::int64_t>& lengths, const SequenceShape& k_shape) const {
    const bool fit = k_shape.size() == 1 && (shapes.batch == 1 || std::size_t(shapes.batch) == lengths.size());
    const auto right = [&](std::int64_t length) { return length >= 0 && length <= k_shape[0]; };
    if (fit && std::all_of(lengths.begin(), lengths.end(), right)) return;
    throw Error(Error::Kind::value, "key_lengths: expected a length of at most " + std::to_string(k_shape[0]) +
                                        " for each batch entry, in one dimension");
  }

  Tables tables_;
};

/// Marks the blocks of keys, between two cuts each, that a box of queries sees.
class Marker {
 public:
  Marker(const WholeMasks& masks, const std::vector<std::int64_t>& cuts, std::uint8_t* marks)
      : masks_(masks), cuts_(cuts), marks_(marks) {}

  void mark(const WholeMask& mask, const Box& queries, std::int64_t first, std::int64_t end) const {
    if (first >= end || cuts_[first] >= mask.keys ||
        std::memchr(marks_ + first, 0, std::size_t(end - first)) == nullptr)
      return;
    const auto count = std::min(cuts_[end], mask.keys) - cuts_[first];
    const auto answer = tile_class(mask.program, queries, masks_.slab(masks_.shapes.k_size, cuts_[first], count));
    if (answer == TileClass::skip) return;
    if ((answer == TileClass::full && cuts_[end] <= mask.keys) || end - first == 1) {
      std::fill(marks_ + first, marks_ + end, std::uint8_t{1});
      return;
    }
    const auto middle = first + (end - first) / 2;
    mark(mask, queries, first, middle);
    mark(mask, queries, middle, end);
  }

  /// Queries first .. end - 1 of the outermost dimension, a few at a time.
  void mark_piece(std::int64_t first, std::int64_t end) const {
    const auto& size = masks_.shapes.q_size;
    const auto inner = std::max<std::int64_t>(1, volume(size) / std::max(1, size[masks_.outer()]));
    const auto step = std::max<std::int64_t>(1, asked_entries / inner);
    for (const auto& one : masks_.masks) {
      for (auto at = first; at < end; at += step) {
        mark(one, masks_.slab(size, at, std::min(step, end - at)), 0, std::int64_t(cuts_.size()) - 1);
      }
    }
  }

 private:
  const WholeMasks& masks_;
  const std::vector<std::int64_t>& cuts_;
  std::uint8_t* marks_;
};

/// The keys of a box that a query sees, by halving where the class is partial. Counts its questions.
std::int64_t visible_keys(const Program& program, const Int3& query, Box keys, std::int64_t& questions) {
  const Box one{query, ones, ones};
  ++questions;
  switch (tile_class(program, one, keys)) {
    case TileClass::skip: return 0;
    case TileClass::full: return volume(keys.extent);
    default: break;
  }
  int i = 0;
  while (i < 2 && keys.extent[i] == 1) ++i;
  if (i == 2 && keys.extent[2] <= 64) {
    const auto bits = word(program, query, {keys.origin, {{1, 1, 64}}, ones});
    return std::popcount(bits & low_bits(keys.extent[2]));
  }
  auto half = keys.extent[i] / 2;
  if (i == 2) half = (half + 63) / 64 * 64;
  auto rest = keys;
  rest.origin[i] += half;
  rest.extent[i] -= half;
  keys.extent[i] = half;
  return visible_keys(program, query, keys, questions) + visible_keys(program, query, rest, questions);
}

/// Sample s of `asked` among a block's entries, each of them once if all are asked. They do not keep step with rows of an
/// image or equal documents, and are symmetric, which makes the mean of what grows evenly exact.
std::int64_t sample_place(std::size_t block, std::int64_t s, std::int64_t asked, std::int64_t entries) {
  if (2 * s >= asked && asked > 1) return entries - 1 - sample_place(block, asked - 1 - s, asked, entries);
  const auto golden = (block * std::size_t(asked) + std::size_t(s) + 1) * 0x9e3779b97f4a7c15;
  return (s * entries + std::int64_t((golden >> 32) * std::uint64_t(entries) >> 32)) / asked;
}

Pieces marked_pieces(const std::vector<std::int64_t>& cuts, const std::vector<std::uint8_t>& marks) {
  Pieces pieces;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    if (!marks[i]) continue;
    if (!pieces.empty() && pieces.back().first + pieces.back().count == cuts[i]) {
      pieces.back().count = cuts[i + 1] - pieces.back().first;
    } else {
      pieces.push_back({cuts[i], cuts[i + 1] - cuts[i]});
    }
  }
  return pieces;
}

void check_cuts(const char* name, const std::vector<std::int64_t>& cuts, std::int64_t size) {
  const bool ends = !cuts.empty() && cuts.front() == 0 && cuts.back() == size;
  if (ends && std::is_sorted(cuts.begin(), cuts.end())) return;
  throw Error(Error::Kind::value, std::string(name) + ": expected to rise from 0 to " + std::to_string(size));
}

}  // namespace
}  // namespace rules

std::vector<Pieces> seen_keys(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape, Align align,
                              const std::vector<Pieces>& queries, std::int64_t unit,
                              const std::vector<std::int64_t>& key_lengths) {
  using namespace rules;
  if (unit < 1) throw Error(Error::Kind::value, "unit: " + std::to_string(unit) + ", expected at least 1");
  if (queries.empty()) return checked_shapes(rule, q_shape, k_shape, align), std::vector<Pieces>{};
  const WholeMasks masks(rule, q_shape, k_shape, align, key_lengths);
  std::vector<std::int64_t> cuts;
  for (std::int64_t at = 0; at < k_shape[0]; at += unit) cuts.push_back(at);
  cuts.push_back(k_shape[0]);
  std::vector<Pieces> seen;
  for (const auto& pieces : queries) {
    std::vector<std::uint8_t> marks(cuts.size());
    const Marker marker(masks, cuts, marks.data());
    for (const auto& [first, count] : pieces) {
      if (first < 0 || count < 0 || count > q_shape[0] - first) {
        throw Error(Error::Kind::value, "queries: a piece outside of the sequence");
      }
      marker.mark_piece(first, first + count);
    }
    seen.push_back(marked_pieces(cuts, marks));
  }
  return seen;
}

std::vector<double> visible_by_block(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                                     Align align, const std::vector<std::int64_t>& cuts, std::int64_t samples,
                                     const std::vector<std::int64_t>& key_lengths) {
  using namespace rules;
  const WholeMasks masks(rule, q_shape, k_shape, align, key_lengths, true);
  check_cuts("cuts", cuts, q_shape[0]);
  const auto& size = masks.shapes.q_size;
  const auto inner = volume(size) / std::max(1, size[masks.outer()]);
  std::vector<double> visible(cuts.size() - 1);
  const auto count = [&](std::int64_t most) {
    std::int64_t questions = 0, queries = 0;
    for (std::size_t i = 0; i < visible.size() && !masks.masks.empty(); ++i) {
      const auto first = cuts[i] * inner, entries = (cuts[i + 1] - cuts[i]) * inner;
      const auto asked = std::min(most, entries);
      double keys = 0;
      for (const auto& mask : masks.masks) {
        const auto every = masks.slab(masks.shapes.k_size, 0, mask.keys);
        for (std::int64_t s = 0; s < asked; ++s) {
          const auto query = coordinate_of(first + sample_place(i, s, asked, entries), size);
          keys += mask.share * double(visible_keys(mask.program, query, every, questions));
        }
      }
      queries += std::min(samples, entries);
      if (asked > 0) visible[i] = keys * double(entries) / double(asked);
    }
    return double(questions) * double(queries) / std::max(double(visible.size()), 1.0);
  };
  if (count(1) <= double(most_questions)) count(std::max<std::int64_t>(samples, 1));
  return visible;
}

std::vector<std::uint8_t> seen_blocks(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                                      Align align, const std::vector<std::int64_t>& q_cuts,
                                      const std::vector<std::int64_t>& k_cuts,
                                      const std::vector<std::int64_t>& key_lengths) {
  using namespace rules;
  const WholeMasks masks(rule, q_shape, k_shape, align, key_lengths);
  check_cuts("q_cuts", q_cuts, q_shape[0]);
  check_cuts("k_cuts", k_cuts, k_shape[0]);
  const auto columns = k_cuts.size() - 1;
  std::vector<std::uint8_t> seen((q_cuts.size() - 1) * columns);
  for (std::size_t i = 0; i + 1 < q_cuts.size(); ++i) {
    Marker(masks, k_cuts, seen.data() + i * columns).mark_piece(q_cuts[i], q_cuts[i + 1]);
  }
  return seen;
}

std::uint64_t rule_hash(const Rule& rule) {
  auto hash = rules::tables_hash(rule);
  for (const unsigned char letter : rule.text()) hash = (hash ^ letter) * 0x9e3779b97f4a7c15, hash ^= hash >> 32;
  return hash;
}

}  // namespace anyflash
