// The tree behind a Rule.
#pragma once

#include <anyflash/rule.h>
#include <anyflash/sharding.h>

#include <memory>
#include <string>

namespace anyflash::rules {

// clang-format off
enum class NodeKind : std::uint8_t {
  full, causal, local, window, prefix, prefix_queries, sink, documents, documents_packed, tiles, neighbourhood, blocks,
  dense,
  both, either, negation,  // left & right, left | right, ~left
  part                     // left, between pieces of longer sequences: only at the root
};
// clang-format on

/// The whole sequences of a part, and its pieces of them.
struct Whole {
  SequenceShape q_shape, k_shape;
  Pieces q, k;
};

/// Numbers and tables as the builder of that kind received them: local (window n, log2_stride, causal), window (a left,
/// b right), prefix, prefix_queries and sink (n), tiles (a shape, b kernel), neighbourhood (a kernel, b dilation, c
/// causal), blocks (n block_q, m block_k, table_q bitmap), dense (table_q mask), documents and documents_packed
/// (table_q, table_k), part (left, whole, table_k key_lengths).
struct Node {
  NodeKind kind = NodeKind::full;
  PerDimension a = 0, b = 0, c = 0;
  std::int64_t n = 0, m = 0;
  int log2_stride = 0;
  bool causal = false;
  TensorView table_q, table_k;
  std::shared_ptr<const Node> left, right;
  std::shared_ptr<const Whole> whole;
  int parts = 1;  // leaves below it
};

}  // namespace anyflash::rules
