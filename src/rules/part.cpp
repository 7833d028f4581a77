#include "rules/part.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "problem/tensor.h"

namespace anyflash {
namespace rules {
namespace {

[[noreturn]] void fail(const std::string& line) { throw Error(Error::Kind::value, line); }

std::string number(std::int64_t n) { return std::to_string(n); }

void check_pieces(const char* side, const Pieces& pieces, const SequenceShape& shape) {
  const std::string what = std::string("rule part: ") + side;
  if (shape.empty() || shape.size() > 3)
    fail(what + " shape of " + number(std::int64_t(shape.size())) + " sizes, expected 1 to 3");
  double entries = 1;
  for (const auto size : shape) {
    if (size < 0) fail(what + " shape with " + number(size) + " entries, expected no negative size");
    entries *= double(size);
  }
  if (entries > double(std::numeric_limits<std::int32_t>::max())) fail(what + " shape of more than 2^31 - 1 entries");
  std::int64_t end = 0;
  for (const auto& [first, count] : pieces) {
    if (count < 1) fail(what + " piece of " + number(count) + " entries, expected at least 1");
    if (first < end)
      fail(what + " piece from " + number(first) + ", expected from " + number(end) + " on: ascending pieces");
    if (count > shape[0] - first) {
      fail(what + " piece up to " + number(first + count) + ", expected at most " + number(shape[0]));
    }
    end = first + count;
  }
  if (pieces.size() > 1 && shape.size() > 1) {
    fail(what + " of " + number(std::int64_t(pieces.size())) + " pieces, expected 1 in a sequence of " +
         number(std::int64_t(shape.size())) + " dimensions");
  }
}

void check_side(const char* side, const SequenceShape& whole, const Pieces& pieces, Int3 local, int dimensions) {
  const std::string what = std::string("rule part: ") + side;
  if (int(whole.size()) != dimensions) {
    fail(what + " of " + number(std::int64_t(whole.size())) + " dimensions, expected " + number(dimensions) +
         " as in the call");
  }
  auto expected = three(whole);
  expected[outermost(dimensions)] = std::int32_t(count_of(pieces));
  for (int i = 0; i < 3; ++i) {
    if (local[i] == expected[i]) continue;
    fail(what + " have " + number(expected[i]) + " entries in a dimension, and the call " + number(local[i]));
  }
}

bool on_device(const Node& node) {
  for (const auto* table : {&node.table_q, &node.table_k})
    if (table->given() && table->device.kind != DeviceKind::cpu) return true;
  return (node.left && on_device(*node.left)) || (node.right && on_device(*node.right));
}

}  // namespace

Int3 three(const SequenceShape& shape) {
  Int3 size{{1, 1, 1}};
  for (std::size_t i = 0; i < shape.size(); ++i) size[int(3 - shape.size() + i)] = std::int32_t(shape[i]);
  return size;
}

std::int64_t count_of(const Pieces& pieces) {
  std::int64_t count = 0;
  for (const auto& piece : pieces) count += piece.count;
  return count;
}

std::int64_t count_before(const Pieces& pieces, std::int64_t n) {
  std::int64_t count = 0;
  for (const auto& piece : pieces) count += std::clamp<std::int64_t>(n - piece.first, 0, piece.count);
  return count;
}

Shapes whole_shapes(const Whole& whole, const Shapes& local) {
  auto shapes = local;
  shapes.q_size = three(whole.q_shape);
  shapes.k_size = three(whole.k_shape);
  return shapes;
}

Pieces flat_pieces(const Pieces& pieces, const SequenceShape& shape, std::int64_t count) {
  std::int64_t inner = 1;
  for (std::size_t i = 1; i < shape.size(); ++i) inner *= shape[i];
  Pieces flat;
  for (const auto& piece : pieces) {
    const auto entries = std::min(piece.count, count);
    if (entries * inner > 0) flat.push_back({piece.first * inner, entries * inner});
    count -= entries;
  }
  return flat;
}

void check_part(const Node& node, const Shapes& local) {
  const auto& whole = *node.whole;
  check_side("queries", whole.q_shape, whole.q, local.q_size, local.dimensions);
  check_side("keys", whole.k_shape, whole.k, local.k_size, local.dimensions);
  if (node.table_k.given() && node.table_k.shape[0] != local.batch) {
    fail("rule part: key_lengths of " + number(node.table_k.shape[0]) + " batch entries, expected " +
         number(local.batch));
  }
}

bool part_has_lengths(const Rule& rule) { return rule.node().kind == NodeKind::part && rule.node().table_k.given(); }

std::int64_t common_block(std::int64_t block, const Pieces& pieces) {
  std::int64_t place = 0;
  for (const auto& piece : pieces) {
    block = std::gcd(std::gcd(block, piece.first), place);
    place += piece.count;
  }
  return block;
}

std::vector<std::int64_t> blocks_of_pieces(std::int64_t block, std::int64_t common, const Pieces& pieces) {
  std::vector<std::int64_t> blocks;
  for (const auto& piece : pieces) {
    for (std::int64_t at = 0; at < piece.count; at += common) blocks.push_back((piece.first + at) / block);
  }
  return blocks;
}

}  // namespace rules

Rule part(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape, Pieces queries, Pieces keys,
          const TensorView& key_lengths) {
  using namespace rules;
  if (rule.node().kind == NodeKind::part) fail("rule part: of a part, expected a rule of whole sequences");
  check_pieces("queries", queries, q_shape);
  check_pieces("keys", keys, k_shape);
  if (q_shape.size() != k_shape.size()) {
    fail("rule part: keys of " + number(std::int64_t(k_shape.size())) + " dimensions, expected " +
         number(std::int64_t(q_shape.size())) + " as the queries");
  }
  auto node = std::make_shared<Node>();
  node->kind = NodeKind::part;
  node->left = std::make_shared<const Node>(rule.node());
  node->parts = rule.node().parts;
  node->whole = std::make_shared<const Whole>(Whole{q_shape, k_shape, std::move(queries), std::move(keys)});
  if (key_lengths.given()) {
    const bool integers = key_lengths.type == ElementType::int32 || key_lengths.type == ElementType::int64;
    if (key_lengths.rank != 1 || !integers || k_shape.size() != 1) {
      fail("rule part: key_lengths of shape " + shape_text(key_lengths) +
           ", expected integers (batch), in one dimension");
    }
    for (std::int64_t b = 0; b < key_lengths.shape[0] && key_lengths.device.kind == DeviceKind::cpu; ++b) {
      const auto length = integer_at(key_lengths, b);
      if (length < 0 || length > k_shape[0]) {
        fail("rule part: key_lengths " + number(length) + ", expected 0 to " + number(k_shape[0]));
      }
    }
    node->table_k = key_lengths;
  }
  if (on_device(*node)) fail("rule part: a table on a GPU, expected all on the CPU");
  return Rule(std::move(node));
}

}  // namespace anyflash
