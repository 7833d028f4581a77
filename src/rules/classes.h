// Tile classes: does a box of queries see none, all, or some of a box of keys?
//
// Boxes may have any extent and step; only their entries inside the sequence count. The answer may be conservative
// (partial when unsure), never wrong. Parts are combined by three-valued logic: skip < partial < full, & is the
// minimum, | the maximum, ~ swaps skip and full. Where coordinates restart in documents, boxes of few segments are
// evaluated segment by segment; for larger ones only the documents' numbers are compared.
#pragma once

#include "rules/words.h"

namespace anyflash::rules {

inline constexpr std::int64_t most_segment_pairs = 64;    // pairs of segments evaluated one by one
inline constexpr std::int64_t most_pairs_read = 1 << 16;  // entries of a dense mask, or of a bitmap, read for one class

/// Aligned coordinates of a box along a dimension: first, first + step, ... last.
struct Span {
  std::int64_t first, last, step;

  ANYFLASH_HD bool one_class(std::int64_t modulus) const { return first == last || step % modulus == 0; }
};

/// One evaluation: a box of queries and a box of keys.
struct Tile {
  Box queries, keys;  // clipped to the sequence
  Span q[3], k[3];
  std::int64_t size[3];  // of the frame
  TileClass documents;   // where the rule has documents: the class of that part
  bool positions;        // aligned coordinates are known (not in a box of many segments)
};

ANYFLASH_HD TileClass turned(TileClass c) {
  return c == TileClass::partial ? c : c == TileClass::skip ? TileClass::full : TileClass::skip;
}
ANYFLASH_HD TileClass both_of(TileClass a, TileClass b) { return a < b ? a : b; }
ANYFLASH_HD TileClass either_of(TileClass a, TileClass b) { return a < b ? b : a; }
ANYFLASH_HD TileClass class_of(bool none, bool all) {
  return none ? TileClass::skip : all ? TileClass::full : TileClass::partial;
}

ANYFLASH_HD std::int64_t common_divisor(std::int64_t a, std::int64_t b) {
  while (b != 0) {
    const auto rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/// Last entry of a box along a dimension, raw.
ANYFLASH_HD std::int32_t last_of(const Box& box, int i) { return box.origin[i] + (box.extent[i] - 1) * box.step[i]; }

/// Is all of a box in the sequence?
ANYFLASH_HD bool whole(const Box& box, Int3 size) {
  return inside({{last_of(box, 0), last_of(box, 1), last_of(box, 2)}}, size);
}

/// A per-dimension rule in dimension i. Intervals move up with x, so the first and the last query decide.
ANYFLASH_HD TileClass class_along(const Atom& atom, int i, const Span& q, const Span& k, std::int64_t size) {
  const auto first = keys_of(atom, i, q.first, size), last = keys_of(atom, i, q.last, size);
  auto least = first.lo, largest = last.hi;
  bool all = k.first >= last.lo && k.last <= first.hi;
  if (const auto m = first.modulus; m > 1) {
    const bool q_fixed = q.one_class(m), k_fixed = k.one_class(m);
    auto divisor = m;  // the residues of both sides are known modulo this
    if (!q_fixed) divisor = common_divisor(divisor, q.step);
    if (!k_fixed) divisor = common_divisor(divisor, k.step);
    if (remainder_of(q.first - k.first, divisor) != 0) return TileClass::skip;
    all = all && q_fixed && k_fixed;
    if (!q_fixed && atom.kind == AtomKind::neighbourhood && !(atom.causal >> i & 1)) {
      // Classes differ in length by one, so their kernels are clamped at different ends: take the widest.
      const std::int64_t kernel = atom.a[i];
      least = kernel_start(q.first / m, kernel, size / m) * m;
      largest = (kernel_start(q.last / m, kernel, (size + m - 1) / m) + kernel) * m - 1;
    }
  }
  return class_of(k.last < least || k.first > largest, all);
}

/// Rows of a dense mask or a bitmap from (q0, k0), read until two entries differ.
ANYFLASH_HD TileClass class_of_bytes(const std::uint8_t* data, std::int64_t stride_q, std::int64_t stride_k,
                                     std::int64_t rows, std::int64_t columns) {
  const bool set = *data != 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < columns; column += 64) {
      const auto n = smaller(64, columns - column);
      if (nonzero_bits(data + row * stride_q + column * stride_k, stride_k, n) != (set ? low_bits(n) : 0)) {
        return TileClass::partial;
      }
    }
  }
  return class_of(!set, set);
}

/// Combines the classes of parts of a tile; `known` is false before the first.
ANYFLASH_HD TileClass merged(bool known, TileClass so_far, TileClass next) {
  return known && so_far != next ? TileClass::partial : next;
}

/// Calls f(flat index of the first entry, step, entries) for each row of a box until it returns false.
template <class F>
ANYFLASH_HD void each_row(const Box& box, const Int3& size, const F& f) {
  for (std::int32_t z = 0; z < box.extent[0]; ++z) {
    for (std::int32_t y = 0; y < box.extent[1]; ++y) {
      const Int3 c{{box.origin[0] + z * box.step[0], box.origin[1] + y * box.step[1], box.origin[2]}};
      if (!f(flat_index(c, size), box.step[2], box.extent[2])) return;
    }
  }
}

ANYFLASH_HD TileClass place_class(const Program& program, const Atom& atom, const Tile& tile) {
  const std::int64_t block_q = atom.kind == AtomKind::blocks ? atom.a[2] : 1;
  const std::int64_t block_k = atom.kind == AtomKind::blocks ? atom.b[2] : 1;
  // The entries that are read: one of the table for each (row of queries, row of keys, block of one, block of the
  // other).
  const auto looks = [](const Box& box, std::int64_t block) {
    const auto span = (last_of(box, 2) - box.origin[2]) / block + 2;
    return std::int64_t(box.extent[0]) * box.extent[1] * smaller(box.extent[2], span);
  };
  const auto looks_q = looks(tile.queries, block_q), looks_k = looks(tile.keys, block_k);
  if (looks_q > most_pairs_read || looks_k > most_pairs_read || looks_q * looks_k > most_pairs_read)
    return TileClass::partial;
  auto result = TileClass::skip;
  bool known = false;
  each_row(tile.queries, program.q_size(), [&](std::int64_t q, std::int64_t q_step, std::int64_t q_count) {
    each_row(tile.keys, program.k_size(), [&](std::int64_t k, std::int64_t k_step, std::int64_t k_count) {
      // In blocks at least as long as the step, every block between the first and the last is touched.
      const bool whole_q = q_step <= block_q, whole_k = k_step <= block_k;
      const auto first_q = q / block_q, first_k = k / block_k;
      const auto rows = whole_q ? (q + (q_count - 1) * q_step) / block_q - first_q + 1 : q_count;
      const auto columns = whole_k ? (k + (k_count - 1) * k_step) / block_k - first_k + 1 : k_count;
      if (whole_q && whole_k) {
        const auto* const at = atom.data + first_q * atom.stride_q + first_k * atom.stride_k;
        result = merged(known, result, class_of_bytes(at, atom.stride_q, atom.stride_k, rows, columns));
        known = true;
        return result != TileClass::partial;
      }
      for (std::int64_t i = 0; i < rows && (!known || result != TileClass::partial); ++i) {
        const auto row = whole_q ? first_q + i : (q + i * q_step) / block_q;
        for (std::int64_t j = 0; j < columns; ++j) {
          const auto column = whole_k ? first_k + j : (k + j * k_step) / block_k;
          const bool set = atom.data[row * atom.stride_q + column * atom.stride_k] != 0;
          result = merged(known, result, class_of(!set, set));
          known = true;
        }
      }
      return result != TileClass::partial;
    });
    return result != TileClass::partial;
  });
  return result;
}

/// Corners: the first (or last) entry's coordinates.
ANYFLASH_HD void corner(const Span* spans, bool last, std::int64_t* c) {
  for (int i = 0; i < 3; ++i) c[i] = last ? spans[i].last : spans[i].first;
}

ANYFLASH_HD TileClass causal_class(const Program& program, const Tile& tile) {
  std::int64_t x_first[3], x_last[3], y_first[3], y_last[3];
  corner(tile.q, false, x_first);
  corner(tile.q, true, x_last);
  corner(tile.k, false, y_first);
  corner(tile.k, true, y_last);
  return class_of(!in_order(y_first, x_last, program.dimensions), in_order(y_last, x_first, program.dimensions));
}

/// prefix, prefix_queries and sink, for a box's first and last entry on their side.
ANYFLASH_HD TileClass first_entries_class(const Program& program, const Atom& atom, const std::int64_t* near,
                                          const std::int64_t* far) {
  const std::int64_t last[3] = {atom.a[0], atom.a[1], atom.a[2]};
  return class_of(!in_order(near, last, program.dimensions), in_order(far, last, program.dimensions));
}

ANYFLASH_HD_CALL TileClass atom_class(const Program& program, const Atom& atom, const Tile& tile) {
  switch (atom.kind) {
    case AtomKind::full: return TileClass::full;
    case AtomKind::documents: return tile.documents;
    case AtomKind::blocks:
    case AtomKind::dense: return place_class(program, atom, tile);
    case AtomKind::sink: {
      std::int64_t near[3], far[3];
      for (int i = 0; i < 3; ++i) near[i] = tile.keys.origin[i], far[i] = last_of(tile.keys, i);
      return first_entries_class(program, atom, near, far);
    }
    default: break;
  }
  if (!tile.positions) return TileClass::partial;
  if (atom.kind == AtomKind::causal) return causal_class(program, tile);
  if (atom.kind == AtomKind::prefix || atom.kind == AtomKind::prefix_queries) {
    const auto* const side = atom.kind == AtomKind::prefix ? tile.k : tile.q;
    std::int64_t near[3], far[3];
    corner(side, false, near);
    corner(side, true, far);
    return first_entries_class(program, atom, near, far);
  }
  auto result = TileClass::full;
  for (int i = 3 - program.dimensions; i < 3 && result != TileClass::skip; ++i) {
    result = both_of(result, class_along(atom, i, tile.q[i], tile.k[i], tile.size[i]));
  }
  if (atom.kind == AtomKind::local && atom.causal && result != TileClass::skip) {
    result = both_of(result, causal_class(program, tile));
  }
  return result;
}

ANYFLASH_HD TileClass rule_class(const Program& program, const Tile& tile) {
  const auto one = [&](int i) {
    const auto& atom = program.atoms[i];
    const auto result = atom_class(program, atom, tile);
    return atom.negated ? turned(result) : result;
  };
  if (program.conjunction) {
    auto result = TileClass::full;
    for (int i = 0; i < program.atom_count && result != TileClass::skip; ++i) result = both_of(result, one(i));
    return result;
  }
  TileClass stack[Program::stack_depth] = {};
  int top = -1;
  for (int i = 0; i < program.op_count; ++i) {
    const auto op = program.ops[i];
    if (op < max_atoms) {
      stack[++top] = one(op);
    } else {
      --top;
      stack[top] = op == Program::op_and ? both_of(stack[top], stack[top + 1]) : either_of(stack[top], stack[top + 1]);
    }
  }
  return stack[0];
}

/// Least and largest document number among segments first .. last: from the ends if numbers never descend, else from
/// the tree.
ANYFLASH_HD DocumentRange documents_of(const DocumentSide& side, std::int64_t first, std::int64_t last) {
  DocumentRange range{side.segments[first].document, side.segments[first].document};
  const auto include = [&](const DocumentRange& other) {
    if (other.least < range.least) range.least = other.least;
    if (other.largest > range.largest) range.largest = other.largest;
  };
  if (side.tree == nullptr) {
    range.largest = side.segments[last].document;
    return range;
  }
  first += side.segment_count;
  last += side.segment_count + 1;
  for (; first < last; first /= 2, last /= 2) {
    if (first % 2) include(side.tree[first++]);
    if (last % 2) include(side.tree[--last]);
  }
  return range;
}

/// Cuts a 1-dimensional box to its entries in a segment; position: of the first in its document. False if there are
/// none.
ANYFLASH_HD bool cut_to_segment(Box& box, const Segment& segment, std::int64_t& position) {
  const std::int64_t origin = box.origin[2], step = box.step[2];
  const auto entries = [&](std::int64_t until) {
    return step == 1 ? until - origin : (until - origin + step - 1) / step;
  };
  const auto skipped = segment.start <= origin ? 0 : entries(segment.start);
  const auto end = smaller(box.extent[2], entries(segment.end));
  if (skipped >= end) return false;
  box.origin[2] = static_cast<std::int32_t>(origin + skipped * step);
  box.extent[2] = static_cast<std::int32_t>(end - skipped);
  position = segment.base + box.origin[2] - segment.start;
  return true;
}

ANYFLASH_HD TileClass class_by_segments(const Program& program, const Tile& tile, std::int32_t q_first,
                                        std::int32_t q_last, std::int32_t k_first, std::int32_t k_last) {
  auto result = TileClass::skip;
  bool known = false;
  for (auto q = q_first; q <= q_last; ++q) {
    const auto& of_query = program.documents.q.segments[q];
    Tile part = tile;
    std::int64_t x, y;
    if (!cut_to_segment(part.queries, of_query, x)) continue;
    const auto& axis_q = program.documents.axes[of_query.document];
    part.q[2] = {axis_q.query(x), axis_q.query(x + std::int64_t(part.queries.extent[2] - 1) * tile.queries.step[2]),
                 std::int64_t(tile.queries.step[2]) * axis_q.q_step};
    part.size[2] = axis_q.r;
    for (auto k = k_first; k <= k_last; ++k) {
      const auto& of_key = program.documents.k.segments[k];
      part.keys = tile.keys;
      if (!cut_to_segment(part.keys, of_key, y)) continue;
      const bool same = of_query.document == of_key.document;
      auto next = TileClass::skip;
      if (same || !program.documents_required) {
        const auto& axis_k = program.documents.axes[of_key.document];
        part.k[2] = {axis_k.key(y), axis_k.key(y + std::int64_t(part.keys.extent[2] - 1) * tile.keys.step[2]),
                     std::int64_t(tile.keys.step[2]) * axis_k.k_step};
        part.documents = class_of(!same, same);
        next = rule_class(program, part);
      }
      result = merged(known, result, next);
      known = true;
      if (result == TileClass::partial) return result;
    }
  }
  return result;
}

/// With documents: the class of their part, and the rule's.
ANYFLASH_HD TileClass class_with_documents(const Program& program, Tile& tile, bool may_meet) {
  if (!may_meet && program.documents_required) return TileClass::skip;
  const auto& [q, k, axes] = program.documents;
  Int3 ends[4] = {tile.queries.origin, tile.queries.origin, tile.keys.origin, tile.keys.origin};
  for (int i = 0; i < 3; ++i) ends[1][i] = last_of(tile.queries, i), ends[3][i] = last_of(tile.keys, i);
  const auto q_first = q.segment_of[flat_index(ends[0], program.q_size())];
  const auto q_last = q.segment_of[flat_index(ends[1], program.q_size())];
  const auto k_first = k.segment_of[flat_index(ends[2], program.k_size())];
  const auto k_last = k.segment_of[flat_index(ends[3], program.k_size())];
  const bool few = (std::int64_t(q_last) - q_first + 1) * (std::int64_t(k_last) - k_first + 1) <= most_segment_pairs;
  if (few && program.restarts) return class_by_segments(program, tile, q_first, q_last, k_first, k_last);

  const auto of_q = documents_of(q, q_first, q_last), of_k = documents_of(k, k_first, k_last);
  bool none = !may_meet || of_q.largest < of_k.least || of_k.largest < of_q.least;
  const bool all = of_q.least == of_q.largest && of_k.least == of_k.largest && of_q.least == of_k.least;
  if (few && !none) {
    none = true;
    for (auto i = q_first; i <= q_last && none; ++i) {
      for (auto j = k_first; j <= k_last; ++j) none = none && q.segments[i].document != k.segments[j].document;
    }
  }
  tile.documents = class_of(none, all);
  tile.positions = !program.restarts;
  return rule_class(program, tile);
}

/// The class of the pairs of a box of queries and a box of keys, counting only entries in the sequences; skip if there
/// are none. may_meet: false if the caller knows that no query shares a document with a key.
ANYFLASH_HD TileClass tile_class(const Program& program, const Box& queries, const Box& keys, bool may_meet = true) {
  Tile tile;
  tile.queries = queries;
  tile.keys = keys;
  for (int i = 0; i < 3; ++i) {
    if (i < 3 - program.dimensions) {  // dimensions that the sequence does not have
      tile.q[i] = tile.k[i] = {0, 0, 1};
      tile.size[i] = 1;
      continue;
    }
    const auto& axis = program.axis[i];
    const auto cut = [&](Box& box, std::int64_t size) {
      const std::int64_t step = box.step[i], left = size - box.origin[i];
      const auto count = step == 1 ? left : (left + step - 1) / step;
      if (count < box.extent[i]) box.extent[i] = static_cast<std::int32_t>(count);
      return left > 0 && box.extent[i] > 0;
    };
    if (!cut(tile.queries, axis.q_size) || !cut(tile.keys, axis.k_size)) return TileClass::skip;
    tile.q[i] = {axis.query(queries.origin[i]), axis.query(last_of(tile.queries, i)),
                 std::int64_t(queries.step[i]) * axis.q_step};
    tile.k[i] = {axis.key(keys.origin[i]), axis.key(last_of(tile.keys, i)), std::int64_t(keys.step[i]) * axis.k_step};
    tile.size[i] = axis.r;
  }
  tile.documents = TileClass::partial;
  tile.positions = true;
  return program.has_documents ? class_with_documents(program, tile, may_meet) : rule_class(program, tile);
}

}  // namespace anyflash::rules
