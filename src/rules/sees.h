// The definition of the mask rules, pair by pair, as in the specification's table: for `pattern` and tests. words.h and
// classes.h are checked against it; it shares only the program with them.
#pragma once

#include "rules/program.h"

namespace anyflash::rules {

/// A pair of entries: aligned coordinates x of the query and y of the key in a frame of r, and their places in memory.
struct Pair {
  std::int64_t x[3], y[3], r[3];
  std::int64_t query_place, key_place;
  bool same_document;
};

inline std::int64_t order_of(const std::int64_t* c, const std::int64_t* r) {
  return (c[0] * r[1] + c[1]) * r[2] + c[2];
}

/// A per-dimension rule in dimension i.
inline bool sees_along(const Atom& atom, int i, const Pair& pair) {
  const auto x = pair.x[i], y = pair.y[i], r = pair.r[i];
  const std::int64_t a = atom.a[i], b = atom.b[i];
  if (atom.kind == AtomKind::local) {
    const auto distance = x > y ? x - y : y - x;
    return distance % b == 0 && distance <= a;
  }
  if (atom.kind == AtomKind::window) return x - y <= a && y - x <= b;
  if (atom.kind == AtomKind::tiles) {
    const auto tiles = (r + a - 1) / a;
    auto centre = x / a;
    if (centre > tiles - 1 - b / 2) centre = tiles - 1 - b / 2;
    if (centre < b / 2) centre = b / 2;
    return y / a >= centre - b / 2 && y / a <= centre + b / 2;
  }
  // neighbourhood
  if (x % b != y % b) return false;
  const auto place = x / b, other = y / b;
  if (atom.causal >> i & 1) return other > place - a && other <= place;
  auto length = r / b;
  if (x % b < r % b) ++length;
  auto start = place - a / 2;
  if (start > length - a) start = length - a;
  if (start < 0) start = 0;
  return other >= start && other < start + a;
}

inline bool sees_atom(const Program& program, const Atom& atom, const Pair& pair) {
  switch (atom.kind) {
    case AtomKind::full: return true;
    case AtomKind::causal: return order_of(pair.x, pair.r) >= order_of(pair.y, pair.r);
    case AtomKind::prefix:
    case AtomKind::prefix_queries: {
      const std::int64_t last[3] = {atom.a[0], atom.a[1], atom.a[2]};
      return order_of(atom.kind == AtomKind::prefix ? pair.y : pair.x, pair.r) <= order_of(last, pair.r);
    }
    case AtomKind::sink: return pair.key_place <= flat_index(atom.a, program.k_size());
    case AtomKind::documents: return pair.same_document;
    case AtomKind::blocks:
      return atom.data[pair.query_place / atom.a[2] * atom.stride_q + pair.key_place / atom.b[2] * atom.stride_k] != 0;
    case AtomKind::dense: return atom.data[pair.query_place * atom.stride_q + pair.key_place * atom.stride_k] != 0;
    default: break;
  }
  for (int i = 0; i < 3; ++i) {
    if (i >= 3 - program.dimensions && !sees_along(atom, i, pair)) return false;
  }
  return atom.kind != AtomKind::local || !atom.causal || order_of(pair.x, pair.r) >= order_of(pair.y, pair.r);
}

/// Does the query see the key? Both must be in their sequences.
inline bool sees(const Program& program, const Int3& query, const Int3& key) {
  Pair pair{};
  for (int i = 0; i < 3; ++i) {
    pair.x[i] = program.axis[i].query(query[i]);
    pair.y[i] = program.axis[i].key(key[i]);
    pair.r[i] = program.axis[i].r;
  }
  pair.query_place = flat_index(query, program.q_size());
  pair.key_place = flat_index(key, program.k_size());
  if (program.has_documents) {
    const auto& [q, k, axes] = program.documents;
    const auto& of_query = q.segments[q.segment_of[pair.query_place]];
    const auto& of_key = k.segments[k.segment_of[pair.key_place]];
    pair.same_document = of_query.document == of_key.document;
    if (program.restarts) {  // the query's document is the frame
      pair.x[2] = axes[of_query.document].query(of_query.base + pair.query_place - of_query.start);
      pair.y[2] = axes[of_key.document].key(of_key.base + pair.key_place - of_key.start);
      pair.r[2] = axes[of_query.document].r;
    }
  }
  bool stack[max_atoms] = {true};
  int top = program.op_count == 0 ? 0 : -1;
  for (int i = 0; i < program.op_count; ++i) {
    const auto op = program.ops[i];
    if (op < max_atoms) {
      stack[++top] = sees_atom(program, program.atoms[op], pair) != program.atoms[op].negated;
    } else {
      --top;
      stack[top] = op == Program::op_and ? stack[top] && stack[top + 1] : stack[top] || stack[top + 1];
    }
  }
  return stack[0];
}

}  // namespace anyflash::rules
