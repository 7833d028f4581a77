// The mask rules straight from a Rule's tree and the caller's tables: no program, no segments, no folded constants. It
// keeps compile and sees() honest.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "rules/compile.h"
#include "rules/node.h"

namespace anyflash::rules::testing {

/// Entry c of a dimension with `size` entries on this side and `other` on the other.
inline std::int64_t aligned(std::int64_t c, std::int64_t size, std::int64_t other, Align align) {
  const auto r = std::max(size, other);
  switch (align) {
    case Align::none_front: return c;
    case Align::none_end: return c + (r - size);
    case Align::scale_front: return c * (r / size);
    default: return (c + 1) * (r / size) - 1;
  }
}

class Definition {
 public:
  Definition(const Rule& rule, const Shapes& shapes, std::int64_t batch = 0, std::int64_t head = 0,
             std::int64_t key_length = -1)
      : rule_(with_lengths(rule, shapes)), shapes_(shapes), k_size_(shapes.k_size), batch_(batch), head_(head) {
    if (key_length >= 0) k_size_[2] = std::int32_t(key_length);
    number(rule_.node());
  }

  bool operator()(Int3 query, Int3 key) const {
    Pair pair;
    pair.q = flat_index(query, shapes_.q_size);
    pair.k = flat_index(key, k_size_);
    for (int i = 3 - shapes_.dimensions; i < 3; ++i) {
      const std::int64_t q_size = shapes_.q_size[i], k_size = k_size_[i];
      pair.x.push_back(aligned(query[i], q_size, k_size, shapes_.align));
      pair.y.push_back(aligned(key[i], k_size, q_size, shapes_.align));
      pair.r.push_back(std::max(q_size, k_size));
    }
    if (!q_ids_.empty() && !k_ids_.empty() && shapes_.dimensions == 1) {
      const auto d_q = q_ids_[pair.q], d_k = k_ids_[pair.k];
      const auto count = [](const std::vector<std::int64_t>& ids, std::int64_t id, std::int64_t end) {
        return std::int64_t(std::count(ids.begin(), ids.begin() + end, id));
      };
      const auto keys = std::int64_t(k_ids_.size()), queries = std::int64_t(q_ids_.size());
      pair.x[0] =
          aligned(count(q_ids_, d_q, pair.q), count(q_ids_, d_q, queries), count(k_ids_, d_q, keys), shapes_.align);
      pair.y[0] =
          aligned(count(k_ids_, d_k, pair.k), count(k_ids_, d_k, keys), count(q_ids_, d_k, queries), shapes_.align);
      pair.r[0] = std::max(count(q_ids_, d_q, queries), count(k_ids_, d_q, keys));
    }
    return holds(rule_.node(), pair);
  }

 private:
  struct Pair {
    std::int64_t q, k;
    std::vector<std::int64_t> x, y, r;
  };

  static std::int64_t order(const std::vector<std::int64_t>& c, const std::vector<std::int64_t>& r) {
    std::int64_t at = 0;
    for (std::size_t i = 0; i < c.size(); ++i) at = at * r[i] + c[i];
    return at;
  }

  static std::int64_t integer(const TensorView& table, std::int64_t at) {
    return table.type == ElementType::int32 ? static_cast<const std::int32_t*>(table.data)[at]
                                            : static_cast<const std::int64_t*>(table.data)[at];
  }

  /// Each entry's document id.
  void number(const Node& node) {
    if (node.left) number(*node.left);
    if (node.right) number(*node.right);
    const auto read = [&](const TensorView& table, std::int64_t n, std::vector<std::int64_t>& ids) {
      ids.clear();
      for (std::int64_t i = 0; i < n; ++i) {
        if (node.kind == NodeKind::documents) {
          const bool batched = table.rank == 2 && table.shape[0] > 1;
          ids.push_back(integer(table, i * table.strides[table.rank - 1] + (batched ? batch_ * table.strides[0] : 0)));
        } else {
          std::int64_t d = 0;
          while (integer(table, (d + 1) * table.strides[0]) <= i) ++d;
          ids.push_back(d);
        }
      }
    };
    if (node.kind == NodeKind::documents || node.kind == NodeKind::documents_packed) {
      read(node.table_q, volume(shapes_.q_size), q_ids_);
      read(node.table_k, volume(k_size_), k_ids_);
    }
  }

  bool entry(const TensorView& table, std::int64_t row, std::int64_t column) const {
    const std::int64_t at[4] = {batch_, head_, row, column};
    std::int64_t offset = 0;
    for (int i = 0; i < table.rank; ++i) {
      const auto index = at[4 - table.rank + i];
      offset += (table.shape[i] == 1 ? 0 : index) * table.strides[i];
    }
    return static_cast<const std::uint8_t*>(table.data)[offset] != 0;
  }

  bool holds(const Node& node, const Pair& pair) const {
    switch (node.kind) {
      case NodeKind::both: return holds(*node.left, pair) && holds(*node.right, pair);
      case NodeKind::either: return holds(*node.left, pair) || holds(*node.right, pair);
      case NodeKind::negation: return !holds(*node.left, pair);
      case NodeKind::full: return true;
      case NodeKind::causal: return order(pair.x, pair.r) >= order(pair.y, pair.r);
      case NodeKind::prefix: return order(pair.y, pair.r) < node.n;
      case NodeKind::prefix_queries: return order(pair.x, pair.r) < node.n;
      case NodeKind::sink: return pair.k < node.n;
      case NodeKind::documents:
      case NodeKind::documents_packed: return q_ids_[pair.q] == k_ids_[pair.k];
      case NodeKind::blocks: return entry(node.table_q, pair.q / node.n, pair.k / node.m);
      case NodeKind::dense: return entry(node.table_q, pair.q, pair.k);
      default: break;
    }
    for (std::size_t i = 0; i < pair.x.size(); ++i) {
      if (!holds_along(node, i, pair.x[i], pair.y[i], pair.r[i])) return false;
    }
    return node.kind != NodeKind::local || !node.causal || order(pair.x, pair.r) >= order(pair.y, pair.r);
  }

  static bool holds_along(const Node& node, std::size_t i, std::int64_t x, std::int64_t y, std::int64_t r) {
    const auto of = [&](const PerDimension& p) { return p.value[p.count == 1 ? 0 : i]; };
    if (node.kind == NodeKind::local) {
      const auto s = std::int64_t{1} << node.log2_stride;
      return std::abs(x - y) % s == 0 && std::abs(x - y) / s < node.n;
    }
    if (node.kind == NodeKind::window) {
      return (of(node.a) < 0 || -of(node.a) <= y - x) && (of(node.b) < 0 || y - x <= of(node.b));
    }
    if (node.kind == NodeKind::tiles) {
      // The kernel slides over the tiles' row until it is centred, or can go no further.
      const auto shape = of(node.a), kernel = of(node.b), tiles = (r + shape - 1) / shape;
      std::int64_t first = 0;
      while (first + kernel / 2 < x / shape && first + kernel < tiles) ++first;
      return y / shape >= first && y / shape - first < kernel;
    }
    const auto kernel = of(node.a), dilation = of(node.b);
    if (x % dilation != y % dilation) return false;
    const auto own = x / dilation, other = y / dilation;
    if (of(node.c)) return other <= own && other >= own - kernel + 1;
    const auto length = std::int64_t((r - x % dilation + dilation - 1) / dilation);
    if (kernel >= length) return other < kernel;  // the whole class (and more than it only between documents)
    const auto start = std::clamp<std::int64_t>(own - kernel / 2, 0, length - kernel);
    return other >= start && other < start + kernel;
  }

  Rule rule_;
  const Shapes shapes_;
  Int3 k_size_;
  std::int64_t batch_, head_;
  std::vector<std::int64_t> q_ids_, k_ids_;
};

}  // namespace anyflash::rules::testing
