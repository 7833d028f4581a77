// What can be wrong with a rule on given shapes.
#include <algorithm>

#include "problem/tensor.h"
#include "rules/compile.h"
#include "rules/documents.h"
#include "rules/node.h"
#include "rules/part.h"

namespace anyflash::rules {
namespace {

[[noreturn]] void fail(const std::string& line) { throw Error(Error::Kind::value, line); }

std::string number(std::int64_t n) { return std::to_string(n); }

void check_dimensions(const char* rule, const PerDimension& values, int dimensions) {
  if (values.count == 1 || values.count == dimensions) return;
  const auto expected = dimensions == 1 ? std::string("1") : "1 or " + number(dimensions);
  fail(std::string("rule ") + rule + ": " + number(values.count) + " numbers, expected " + expected +
       " as the sequence's dimensions");
}

void check_size(const std::string& what, std::int64_t size, std::int64_t expected, const char* unit, const char* as,
                bool may_be_one) {
  if (size == expected || (may_be_one && size == 1)) return;
  fail(what + " has " + number(size) + " " + unit + ", expected " + number(expected) + (may_be_one ? " (or 1)" : "") +
       as);
}

void check_ids(const std::string& what, const TensorView& ids, std::int64_t batch, std::int64_t entries,
               const char* as) {
  if (ids.rank == 2) check_size(what, ids.shape[0], batch, "batch entries", " as in query", true);
  check_size(what, ids.shape[ids.rank - 1], entries, "entries", as, false);
}

void check_lengths(const std::string& what, const TensorView& lengths, std::int64_t entries, const char* as) {
  if (lengths.device.kind != DeviceKind::cpu) return;  // only kernels read them
  std::int64_t before = integer_at(lengths, 0);
  if (before != 0) fail(what + ": starts at " + number(before) + ", expected 0");
  for (std::int64_t i = 1; i < lengths.shape[0]; ++i) {
    const auto next = integer_at(lengths, i);
    if (next < before) {
      fail(what + ": falls from " + number(before) + " to " + number(next) + " at entry " + number(i) +
           ", expected no fall");
    }
    before = next;
  }
  if (before != entries) fail(what + ": ends at " + number(before) + ", expected " + number(entries) + as);
}

std::int64_t blocks_of(std::int64_t size, std::int64_t block) { return size / block + (size % block != 0); }

void check_bitmap(const Node& node, const Shapes& shapes) {
  const auto& map = node.table_q;
  const std::string what = "rule blocks: bitmap";
  if (map.rank == 4) check_size(what, map.shape[0], shapes.batch, "batch entries", " as in query", true);
  if (map.rank >= 3) check_size(what, map.shape[map.rank - 3], shapes.heads, "heads", " as in query", true);
  check_size(what, map.shape[map.rank - 2], blocks_of(volume(shapes.q_size), node.n), "rows", " for the queries",
             false);
  check_size(what, map.shape[map.rank - 1], blocks_of(volume(shapes.k_size), node.m), "columns", " for the keys",
             false);
}

void check_mask(const Node& node, const Shapes& shapes) {
  const auto& mask = node.table_q;
  const std::string what = "rule dense: mask";
  if (mask.rank == 4) {
    check_size(what, mask.shape[0], shapes.batch, "batch entries", " as in query", true);
    check_size(what, mask.shape[1], shapes.heads, "heads", " as in query", true);
  }
  check_size(what, mask.shape[mask.rank - 2], volume(shapes.q_size), "rows", " as the queries", true);
  check_size(what, mask.shape[mask.rank - 1], volume(shapes.k_size), "columns", " as the keys", true);
}

bool same_table(const TensorView& a, const TensorView& b) {
  if (a.data != b.data || a.type != b.type || a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; ++i) {
    if (a.shape[i] != b.shape[i] || a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

void check_node(const Node& node, const Shapes& shapes, const Node*& documents) {
  const auto d = shapes.dimensions;
  switch (node.kind) {
    case NodeKind::window:
    case NodeKind::tiles: {
      const auto* const name = node.kind == NodeKind::window ? "window" : "tiles";
      check_dimensions(name, node.a, d);
      return check_dimensions(name, node.b, d);
    }
    case NodeKind::neighbourhood:
      check_dimensions("neighbourhood", node.a, d);
      check_dimensions("neighbourhood", node.b, d);
      return check_dimensions("neighbourhood", node.c, d);
    case NodeKind::blocks: return check_bitmap(node, shapes);
    case NodeKind::dense: return check_mask(node, shapes);
    case NodeKind::documents:
    case NodeKind::documents_packed:
      if (documents == nullptr) {
        documents = &node;
      } else if (documents->kind != node.kind || !same_table(documents->table_q, node.table_q) ||
                 !same_table(documents->table_k, node.table_k)) {
        fail("rule: two tables of documents, at most one");
      }
      return;
    default:
      if (node.left) check_node(*node.left, shapes, documents);
      if (node.right) check_node(*node.right, shapes, documents);
  }
}

}  // namespace

void check(const Rule& rule, const Shapes& shapes) {
  const auto whole = with_lengths(rule, shapes);
  if (whole.node().kind == NodeKind::part) {
    check_part(whole.node(), shapes);
    return check(Rule(whole.node().left), whole_shapes(*whole.node().whole, shapes));
  }
  if (whole.node().parts > max_atoms) {
    fail("rule: " + number(whole.node().parts) + " parts, at most " + number(max_atoms));
  }
  const Node* documents = nullptr;
  check_node(whole.node(), shapes, documents);
  if (documents == nullptr) return;
  const auto queries = volume(shapes.q_size), keys = volume(shapes.k_size);
  if (documents->kind == NodeKind::documents) {
    check_ids("rule documents: ids_q", documents->table_q, shapes.batch, queries, " as the queries");
    check_ids("rule documents: ids_k", documents->table_k, shapes.batch, keys, " as the keys");
  } else {
    check_lengths("cu_seqlens_q", documents->table_q, queries, " as the queries");
    check_lengths("cu_seqlens_k", documents->table_k, keys, " as the keys");
  }
  if (std::max(queries, keys) >= std::int64_t{1} << 31) fail("rule documents: more than 2^31 - 1 entries");
}

}  // namespace anyflash::rules
