// Mask rules: which keys a query sees. A rule is a value: cheap to copy, combined with & | ~.
//
// x and y are the aligned coordinates of a query and a key (see Align in attention.h), order(.) is the row-major index
// of a coordinate in the joint shape R_i = max(q_i, k_i). No rule needs a matrix in memory, except `dense`.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

#include <anyflash/tensor.h>

namespace anyflash {

/// One number for each dimension of the sequence, outermost first; a single number stands for all of them.
struct PerDimension {
  int count = 1;
  std::int64_t value[3] = {0, 0, 0};
  PerDimension(std::int64_t all) : value{all, all, all} {}
  PerDimension(std::initializer_list<std::int64_t> values);  ///< 1 to 3 values, else throws Error
};

namespace rules {
struct Node;
}

/// The name of a table in a rule's text.
using NameOfTable = std::function<std::string(const TensorView&)>;

/// Which keys a query sees. Made by the functions below, combined with & | ~. Immutable, cheap to copy. It refers to
/// the tables that it is made of without copying them: they must outlive it.
class Rule {
 public:
  Rule();                                                  ///< full()
  explicit Rule(std::shared_ptr<const rules::Node> node);  ///< throws Error if it is null
  Rule(const Rule&) = default;                             // moving copies, so that a moved-from rule stays valid
  Rule& operator=(const Rule&) = default;

  /// The rule as text, e.g. "causal() & local(256)"; tables are printed as their shapes.
  std::string text() const;
  /// The same, with tables printed as the names that name_of returns, for parse_rule to read.
  std::string text(const NameOfTable& name_of) const;
  const rules::Node& node() const { return *node_; }

  friend Rule operator&(const Rule& a, const Rule& b);  ///< visible where both are
  friend Rule operator|(const Rule& a, const Rule& b);  ///< visible where either is
  friend Rule operator~(const Rule& a);                 ///< visible where it is not

 private:
  std::shared_ptr<const rules::Node> node_;
};

/// Every query sees every key.
Rule full();

/// order(x) >= order(y).
Rule causal();

/// In every dimension, with s = 2^log2_stride: |x_i - y_i| is a multiple of s and |x_i - y_i| / s < window;
/// and order(x) >= order(y) if causal. window >= 1, 0 <= log2_stride <= 30.
Rule local(std::int64_t window, std::int64_t log2_stride = 0, bool causal = false);

/// In every dimension -left_i <= y_i - x_i <= right_i; a negative bound is unlimited.
Rule window(PerDimension left, PerDimension right);

/// order(y) < n, n >= 0: every query sees the keys of the first n coordinates.
Rule prefix(std::int64_t n);

/// order(x) < n, n >= 0: the queries of the first n coordinates see every key.
/// prefix(n) | prefix_queries(n) makes the first n tokens global.
Rule prefix_queries(std::int64_t n);

/// Every query sees the first n keys in memory order, whatever the alignment and the documents. n >= 0.
Rule sink(std::int64_t n);

/// Query and key belong to the same document. ids_q: (queries) or (batch, queries), ids_k likewise; int32 or int64, any
/// values. In a 1-dimensional sequence the coordinates restart at 0 in each document, for every other part of the rule,
/// and the alignment applies within each document. sink, blocks and dense do not restart: they use positions in memory.
Rule documents(const TensorView& ids_q, const TensorView& ids_k);

/// The same from cumulative lengths, (documents + 1) each, int32 or int64, from 0 to the sequence's length.
Rule documents_packed(const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k);

/// Sliding-tile attention. In each dimension entries are grouped into tiles of `shape` entries. A query in a tile sees
/// the `kernel` tiles (odd) centred on that tile. Near an edge the centre is clamped so that the kernel stays inside,
/// where it fits.
Rule tiles(PerDimension shape, PerDimension kernel);

/// Neighbourhood attention (NATTEN). In each dimension x and y lie in one residue class modulo dilation. Inside the
/// class, of length L, x' = x div dilation. y' runs from start to start + kernel - 1, where start is x' - kernel div 2
/// clamped to 0 .. L - kernel. In a causal dimension y' runs from x' - kernel + 1 to x'. A kernel longer than L sees
/// the whole class.
Rule neighbourhood(PerDimension kernel, PerDimension dilation = 1, PerDimension causal = 0);

/// The bit of (query div block_q, key div block_k) is set, with queries and keys counted in memory order.
/// bitmap: (rows, columns), (heads, rows, columns) or (batch, heads, rows, columns), batch and heads may be 1; boolean
/// or uint8; rows = ceil(queries / block_q), columns = ceil(keys / block_k).
Rule blocks(const TensorView& bitmap, std::int64_t block_q, std::int64_t block_k);

/// The mask's entry is true (boolean) or not zero (uint8). mask: (queries, keys), or (batch, heads, queries, keys),
/// where each size may be 1.
Rule dense(const TensorView& mask);

/// Reads a rule without tables from text as `Rule::text` writes it: calls, & | ~ and parentheses. `[a, b]` gives one
/// number per dimension; key=value arguments are allowed. Throws Error with the column of the fault.
Rule parse_rule(std::string_view text);

/// Returns the table of a name in a rule's text; throws Error if there is none.
using TableOfName = std::function<TensorView(const std::string&)>;

/// The same, with tables by name: documents(ids_q, ids_k), documents_packed(cu_q, cu_k), blocks(bitmap, 64, 64),
/// dense(mask). Exceptions of table_of pass through.
Rule parse_rule(std::string_view text, const TableOfName& table_of);

}  // namespace anyflash
