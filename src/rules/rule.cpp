// Rule builders, operators and text.
#include <anyflash/rule.h>

#include "problem/tensor.h"
#include "rules/node.h"
#include "rules/program.h"

namespace anyflash {
namespace {

using rules::Node;
using rules::NodeKind;

// A tree is walked by recursion; so many parts are far more than a program takes, but fit the stack.
constexpr int largest_tree = 1024;

[[noreturn]] void fail(const std::string& line) { throw Error(Error::Kind::value, line); }

void at_least(const char* what, std::int64_t value, std::int64_t least) {
  if (value < least)
    fail(std::string(what) + " " + std::to_string(value) + ", expected at least " + std::to_string(least));
}

void counted(const char* what, const PerDimension& values) {
  if (values.count >= 1 && values.count <= 3) return;
  fail(std::string(what) + " of " + std::to_string(values.count) + " numbers, expected 1 to 3");
}

void at_least(const char* what, const PerDimension& values, std::int64_t least) {
  counted(what, values);
  for (int i = 0; i < values.count; ++i) at_least(what, values.value[i], least);
}

Rule leaf(Node node) { return Rule(std::make_shared<const Node>(std::move(node))); }

Rule first_entries(NodeKind kind, const char* what, std::int64_t n) {
  at_least(what, n, 0);
  Node node;
  node.kind = kind;
  node.n = n;
  return leaf(node);
}

void given(const std::string& what, const TensorView& table) {
  if (!table.given()) fail(what + " not given");
  if (table.rank > TensorView::max_rank) fail(what + " rank " + std::to_string(table.rank) + ", expected at most 8");
  for (int i = 0; i < table.rank; ++i) {
    if (table.shape[i] < 0) fail(what + " shape " + shape_text(table) + ", expected no negative size");
  }
  if (table.data == nullptr && table.elements() > 0) fail(what + " data pointer null");
}

void integers(const std::string& what, const TensorView& table) {
  if (table.type != ElementType::int32 && table.type != ElementType::int64) {
    throw Error(Error::Kind::type, what + " type " + element_name(table.type) + ", expected int32 or int64");
  }
}

void booleans(const std::string& what, const TensorView& table) {
  if (table.type != ElementType::boolean && table.type != ElementType::uint8) {
    throw Error(Error::Kind::type, what + " type " + element_name(table.type) + ", expected boolean or uint8");
  }
}

void rank_of(const std::string& what, const TensorView& table, const char* expected, bool right) {
  if (!right) fail(what + " shape " + shape_text(table) + ", expected " + expected);
}

using Tree = std::shared_ptr<const Node>;

void not_a_part(const Node& node) {
  if (node.kind == NodeKind::part) fail("rule part: combined with another rule, expected the part of the whole rule");
}

Rule combine(NodeKind kind, const Tree& a, const Tree& b) {
  not_a_part(*a);
  not_a_part(*b);
  Node node;
  node.kind = kind;
  node.parts = a->parts + b->parts;
  if (node.parts > largest_tree) {
    fail("rule: " + std::to_string(node.parts) + " parts, at most " + std::to_string(rules::max_atoms));
  }
  node.left = a;
  node.right = b;
  return leaf(std::move(node));
}

// --- text

std::string text_of(const PerDimension& values) {
  if (values.count == 1) return std::to_string(values.value[0]);
  std::string text = "[";
  for (int i = 0; i < values.count; ++i) text += (i ? ", " : "") + std::to_string(values.value[i]);
  return text + "]";
}

bool all_equal(const PerDimension& values, std::int64_t value) {
  for (int i = 0; i < values.count; ++i) {
    if (values.value[i] != value) return false;
  }
  return true;
}

std::string pieces_text(const char* name, const Pieces& pieces, const SequenceShape& shape) {
  std::string text = std::string(", ") + name;
  for (const auto& piece : pieces) {
    text += " " + std::to_string(piece.first) + "-" + std::to_string(piece.first + piece.count);
  }
  text += " of";
  for (const auto size : shape) text += " " + std::to_string(size);
  return text;
}

std::string leaf_text(const Node& node, const NameOfTable& name_of) {
  const auto n = std::to_string(node.n);
  switch (node.kind) {
    case NodeKind::full: return "full()";
    case NodeKind::causal: return "causal()";
    case NodeKind::local:
      return "local(" + n + (node.log2_stride ? ", log2_stride=" + std::to_string(node.log2_stride) : "") +
             (node.causal ? ", causal=true)" : ")");
    case NodeKind::window: return "window(" + text_of(node.a) + ", " + text_of(node.b) + ")";
    case NodeKind::prefix: return "prefix(" + n + ")";
    case NodeKind::prefix_queries: return "prefix_queries(" + n + ")";
    case NodeKind::sink: return "sink(" + n + ")";
    case NodeKind::tiles: return "tiles(" + text_of(node.a) + ", " + text_of(node.b) + ")";
    case NodeKind::neighbourhood:
      return "neighbourhood(" + text_of(node.a) + (all_equal(node.b, 1) ? "" : ", dilation=" + text_of(node.b)) +
             (all_equal(node.c, 0) ? ")" : ", causal=" + text_of(node.c) + ")");
    case NodeKind::documents: return "documents(" + name_of(node.table_q) + ", " + name_of(node.table_k) + ")";
    case NodeKind::documents_packed:
      return "documents_packed(" + name_of(node.table_q) + ", " + name_of(node.table_k) + ")";
    case NodeKind::blocks: return "blocks(" + name_of(node.table_q) + ", " + n + ", " + std::to_string(node.m) + ")";
    case NodeKind::dense: return "dense(" + name_of(node.table_q) + ")";
    default: return {};
  }
}

// Precedence of operators: | 0, & 1, ~ 2. An operand of lower precedence needs parentheses. So does a right operand of
// the same operator, so that the same tree is read back.
std::string node_text(const Node& node, int binding, const NameOfTable& name_of) {
  const auto wrapped = [&](int own, std::string text) { return own < binding ? "(" + std::move(text) + ")" : text; };
  const auto operand = [&](const Node& of, int own) { return node_text(of, own, name_of); };
  switch (node.kind) {
    case NodeKind::either: return wrapped(0, operand(*node.left, 0) + " | " + operand(*node.right, 1));
    case NodeKind::both: return wrapped(1, operand(*node.left, 1) + " & " + operand(*node.right, 2));
    case NodeKind::negation: return "~" + operand(*node.left, 2);
    case NodeKind::part:
      return "part(" + operand(*node.left, 0) + pieces_text("queries", node.whole->q, node.whole->q_shape) +
             pieces_text("keys", node.whole->k, node.whole->k_shape) +
             (node.table_k.given() ? ", key_lengths " + name_of(node.table_k) : "") + ")";
    default: return leaf_text(node, name_of);
  }
}

}  // namespace

PerDimension::PerDimension(std::initializer_list<std::int64_t> values) : count(static_cast<int>(values.size())) {
  if (values.size() < 1 || values.size() > 3) {
    fail("rule: " + std::to_string(values.size()) + " numbers for the dimensions, expected 1 to 3");
  }
  int i = 0;
  for (const auto number : values) value[i++] = number;
}

Rule::Rule() : Rule(full()) {}

Rule::Rule(std::shared_ptr<const rules::Node> node) : node_(std::move(node)) {
  if (!node_) fail("rule: null");
}

std::string Rule::text() const { return text(&shape_text); }

std::string Rule::text(const NameOfTable& name_of) const { return name_of ? node_text(*node_, 0, name_of) : text(); }

Rule operator&(const Rule& a, const Rule& b) { return combine(NodeKind::both, a.node_, b.node_); }
Rule operator|(const Rule& a, const Rule& b) { return combine(NodeKind::either, a.node_, b.node_); }

Rule operator~(const Rule& a) {
  not_a_part(*a.node_);
  if (a.node_->kind == NodeKind::negation) return Rule(a.node_->left);  // so that repeated ~ adds no depth
  Node node;
  node.kind = NodeKind::negation;
  node.parts = a.node_->parts;
  node.left = a.node_;
  return leaf(std::move(node));
}

Rule full() {
  static const auto& rule = *new Rule(leaf({}));  // never destroyed: calls may come while the process ends
  return rule;
}

Rule causal() {
  Node node;
  node.kind = NodeKind::causal;
  return leaf(node);
}

Rule local(std::int64_t window, std::int64_t log2_stride, bool causal) {
  at_least("rule local: window", window, 1);
  at_least("rule local: log2_stride", log2_stride, 0);
  if (log2_stride > 30) fail("rule local: log2_stride " + std::to_string(log2_stride) + ", expected at most 30");
  Node node;
  node.kind = NodeKind::local;
  node.n = window;
  node.log2_stride = int(log2_stride);
  node.causal = causal;
  return leaf(node);
}

Rule window(PerDimension left, PerDimension right) {
  counted("rule window: left", left);
  counted("rule window: right", right);
  Node node;
  node.kind = NodeKind::window;
  node.a = left;
  node.b = right;
  return leaf(node);
}

Rule prefix(std::int64_t n) { return first_entries(NodeKind::prefix, "rule prefix: n", n); }
Rule prefix_queries(std::int64_t n) { return first_entries(NodeKind::prefix_queries, "rule prefix_queries: n", n); }
Rule sink(std::int64_t n) { return first_entries(NodeKind::sink, "rule sink: n", n); }

Rule documents(const TensorView& ids_q, const TensorView& ids_k) {
  for (const auto* ids : {&ids_q, &ids_k}) {
    const std::string what = ids == &ids_q ? "rule documents: ids_q" : "rule documents: ids_k";
    given(what, *ids);
    integers(what, *ids);
    rank_of(what, *ids, ids == &ids_q ? "(queries) or (batch, queries)" : "(keys) or (batch, keys)",
            ids->rank == 1 || ids->rank == 2);
  }
  if (ids_q.device != ids_k.device) {
    throw Error(Error::Kind::device, "rule documents: ids_k on " + device_name(ids_k.device) + ", expected " +
                                         device_name(ids_q.device) + " as ids_q");
  }
  Node node;
  node.kind = NodeKind::documents;
  node.table_q = ids_q;
  node.table_k = ids_k;
  return leaf(node);
}

Rule documents_packed(const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k) {
  for (const auto* lengths : {&cu_seqlens_q, &cu_seqlens_k}) {
    const std::string what = lengths == &cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k";
    given(what + ":", *lengths);
    integers(what + ":", *lengths);
    rank_of(what + ":", *lengths, "(documents + 1)", lengths->rank == 1 && lengths->shape[0] >= 1);
  }
  if (cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]) {
    fail("cu_seqlens_k: " + std::to_string(cu_seqlens_k.shape[0]) + " entries, expected " +
         std::to_string(cu_seqlens_q.shape[0]) + " as in cu_seqlens_q");
  }
  if (cu_seqlens_q.device != cu_seqlens_k.device) {
    throw Error(Error::Kind::device, "cu_seqlens_k: on " + device_name(cu_seqlens_k.device) + ", expected " +
                                         device_name(cu_seqlens_q.device) + " as cu_seqlens_q");
  }
  Node node;
  node.kind = NodeKind::documents_packed;
  node.table_q = cu_seqlens_q;
  node.table_k = cu_seqlens_k;
  return leaf(node);
}

Rule tiles(PerDimension shape, PerDimension kernel) {
  at_least("rule tiles: shape", shape, 1);
  at_least("rule tiles: kernel", kernel, 1);
  for (int i = 0; i < kernel.count; ++i) {
    if (kernel.value[i] % 2 == 0)
      fail("rule tiles: kernel " + std::to_string(kernel.value[i]) + ", expected an odd number");
  }
  Node node;
  node.kind = NodeKind::tiles;
  node.a = shape;
  node.b = kernel;
  return leaf(node);
}

Rule neighbourhood(PerDimension kernel, PerDimension dilation, PerDimension causal) {
  at_least("rule neighbourhood: kernel", kernel, 1);
  at_least("rule neighbourhood: dilation", dilation, 1);
  counted("rule neighbourhood: causal", causal);
  for (int i = 0; i < causal.count; ++i) {
    if (causal.value[i] != 0 && causal.value[i] != 1) {
      fail("rule neighbourhood: causal " + std::to_string(causal.value[i]) + ", expected 0 or 1");
    }
  }
  Node node;
  node.kind = NodeKind::neighbourhood;
  node.a = kernel;
  node.b = dilation;
  node.c = causal;
  return leaf(node);
}

Rule blocks(const TensorView& bitmap, std::int64_t block_q, std::int64_t block_k) {
  at_least("rule blocks: block_q", block_q, 1);
  at_least("rule blocks: block_k", block_k, 1);
  given("rule blocks: bitmap", bitmap);
  booleans("rule blocks: bitmap", bitmap);
  rank_of("rule blocks: bitmap", bitmap, "(rows, columns), (heads, rows, columns) or (batch, heads, rows, columns)",
          bitmap.rank >= 2 && bitmap.rank <= 4);
  Node node;
  node.kind = NodeKind::blocks;
  node.n = block_q;
  node.m = block_k;
  node.table_q = bitmap;
  return leaf(node);
}

Rule dense(const TensorView& mask) {
  given("rule dense: mask", mask);
  booleans("rule dense: mask", mask);
  rank_of("rule dense: mask", mask, "(queries, keys) or (batch, heads, queries, keys)",
          mask.rank == 2 || mask.rank == 4);
  Node node;
  node.kind = NodeKind::dense;
  node.table_q = mask;
  return leaf(node);
}

}  // namespace anyflash
