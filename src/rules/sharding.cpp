// What a split of a sequence over processes needs to know of a rule: the keys that some queries see, and how many.
#include <anyflash/sharding.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "rules/classes.h"
#include "rules/compile.h"
#include "rules/part.h"

namespace anyflash {
namespace rules {
namespace {

constexpr std::int64_t asked_entries = 2048;      // queries that are asked for together
constexpr std::int64_t most_questions = 1 << 18;  // for more than one sample a block: about 20 ms
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

/// The programs of all batch entries and heads whose masks differ.
class WholeMasks {
 public:
  WholeMasks(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape, Align align)
      : shapes(checked_shapes(rule, q_shape, k_shape, align)) {
    if (volume(shapes.q_size) == 0 || volume(shapes.k_size) == 0) return;
    for (std::int64_t b = 0; b < shapes.batch; ++b)
      for (std::int64_t h = 0; h < shapes.heads; ++h) programs.push_back(compile(rule, shapes, b, h, tables_));
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
  std::vector<Program> programs;

 private:
  Tables tables_;
};

/// Marks the blocks of keys, between two cuts each, that a box of queries sees.
class Marker {
 public:
  Marker(const WholeMasks& masks, const std::vector<std::int64_t>& cuts, std::uint8_t* marks)
      : masks_(masks), cuts_(cuts), marks_(marks) {}

  void mark(const Program& program, const Box& queries, std::int64_t first, std::int64_t end) const {
    if (first >= end || std::memchr(marks_ + first, 0, std::size_t(end - first)) == nullptr) return;
    const auto keys = masks_.slab(masks_.shapes.k_size, cuts_[first], cuts_[end] - cuts_[first]);
    const auto answer = tile_class(program, queries, keys);
    if (answer == TileClass::skip) return;
    if (answer == TileClass::full || end - first == 1) {
      std::fill(marks_ + first, marks_ + end, std::uint8_t{1});
      return;
    }
    const auto middle = first + (end - first) / 2;
    mark(program, queries, first, middle);
    mark(program, queries, middle, end);
  }

  /// Queries first .. end - 1 of the outermost dimension, a few at a time.
  void mark_piece(std::int64_t first, std::int64_t end) const {
    const auto& size = masks_.shapes.q_size;
    const auto inner = std::max<std::int64_t>(1, volume(size) / std::max(1, size[masks_.outer()]));
    const auto step = std::max<std::int64_t>(1, asked_entries / inner);
    for (const auto& program : masks_.programs) {
      for (auto at = first; at < end; at += step) {
        mark(program, masks_.slab(size, at, std::min(step, end - at)), 0, std::int64_t(cuts_.size()) - 1);
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
                              const std::vector<Pieces>& queries, std::int64_t unit) {
  using namespace rules;
  if (unit < 1) throw Error(Error::Kind::value, "unit: " + std::to_string(unit) + ", expected at least 1");
  if (queries.empty()) return checked_shapes(rule, q_shape, k_shape, align), std::vector<Pieces>{};
  const WholeMasks masks(rule, q_shape, k_shape, align);
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
                                     Align align, const std::vector<std::int64_t>& cuts, std::int64_t samples) {
  using namespace rules;
  const WholeMasks masks(rule, q_shape, k_shape, align);
  check_cuts("cuts", cuts, q_shape[0]);
  const auto& size = masks.shapes.q_size;
  const auto inner = volume(size) / std::max(1, size[masks.outer()]);
  std::vector<double> visible(cuts.size() - 1);
  const auto count = [&](std::int64_t most) {
    std::int64_t questions = 0, queries = 0;
    for (std::size_t i = 0; i < visible.size() && !masks.programs.empty(); ++i) {
      const auto first = cuts[i] * inner, entries = (cuts[i + 1] - cuts[i]) * inner;
      const auto asked = std::min(most, entries);
      std::int64_t keys = 0;
      for (const auto& program : masks.programs) {
        for (std::int64_t s = 0; s < asked; ++s) {
          const auto query = coordinate_of(first + (2 * s + 1) * entries / (2 * asked), size);
          keys += visible_keys(program, query, {{{0, 0, 0}}, masks.shapes.k_size, ones}, questions);
        }
      }
      queries += std::min(samples, entries);
      if (asked > 0) visible[i] = double(keys) * double(entries) / double(asked) / double(masks.programs.size());
    }
    return double(questions) * double(queries) / std::max(double(visible.size()), 1.0);
  };
  if (count(1) <= double(most_questions)) count(std::max<std::int64_t>(samples, 1));
  return visible;
}

std::vector<std::uint8_t> seen_blocks(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                                      Align align, const std::vector<std::int64_t>& q_cuts,
                                      const std::vector<std::int64_t>& k_cuts) {
  using namespace rules;
  const WholeMasks masks(rule, q_shape, k_shape, align);
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
