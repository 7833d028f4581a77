#include "rules/documents.h"

#include <algorithm>
#include <utility>

#include "problem/tensor.h"

namespace anyflash::rules {
namespace {

using Ids = std::vector<std::int64_t>;

/// A segment of equal ids, before documents are numbered. base: entries of the document before it.
struct IdRun {
  std::int64_t id;
  std::int32_t start, end, base = 0;
};
using IdRuns = std::vector<IdRun>;

template <typename T>
IdRuns runs_of_ids(const T* ids, std::int64_t stride, std::int64_t count) {
  IdRuns runs;
  for (std::int64_t i = 0; i < count;) {
    const T id = ids[i * stride];
    const auto start = i;
    while (++i < count && ids[i * stride] == id) {
    }
    runs.push_back({id, std::int32_t(start), std::int32_t(i)});
  }
  return runs;
}

IdRuns runs_of_ids(const TensorView& ids, std::int64_t count) {
  if (ids.type == ElementType::int64)
    return runs_of_ids(static_cast<const std::int64_t*>(ids.data), ids.strides[0], count);
  return runs_of_ids(static_cast<const std::int32_t*>(ids.data), ids.strides[0], count);
}

IdRuns runs_of_lengths(const TensorView& lengths, std::int64_t count) {
  IdRuns runs;
  for (std::int64_t i = 0; i + 1 < lengths.shape[0]; ++i) {
    const auto start = std::min(integer_at(lengths, i), count), end = std::min(integer_at(lengths, i + 1), count);
    if (start < end) runs.push_back({i, std::int32_t(start), std::int32_t(end)});
  }
  return runs;
}

std::size_t place_of(const Ids& values, std::int64_t id) {
  return std::size_t(std::lower_bound(values.begin(), values.end(), id) - values.begin());
}

/// Finds the bases; returns the length of each document, by its id's place among all ids.
std::vector<std::int64_t> measure(IdRuns& runs, const Ids& values) {
  std::vector<std::int64_t> sizes(values.size());
  for (auto& run : runs) {
    auto& size = sizes[place_of(values, run.id)];
    run.base = std::int32_t(size);
    size += run.end - run.start;
  }
  return sizes;
}

/// The parts of the runs in the pieces, which follow each other.
IdRuns cut(const IdRuns& runs, const Pieces& pieces) {
  IdRuns own;
  std::int64_t place = 0;
  auto run = runs.begin();
  for (const auto& [first, count] : pieces) {
    while (run != runs.end() && run->end <= first) ++run;
    for (auto at = run; at != runs.end() && at->start < first + count; ++at) {
      const auto start = std::max<std::int64_t>(at->start, first), end = std::min<std::int64_t>(at->end, first + count);
      const auto moved = place - first;
      own.push_back(
          {at->id, std::int32_t(start + moved), std::int32_t(end + moved), std::int32_t(at->base + start - at->start)});
    }
    place += count;
  }
  return own;
}

bool ascending(const IdRuns& runs, const Ids& values, const std::vector<std::int32_t>& numbers) {
  std::int32_t before = 0;
  for (const auto& run : runs) {
    const auto number = numbers[place_of(values, run.id)];
    if (number < before) return false;
    before = number;
  }
  return true;
}

/// Document numbers: by value if that makes them ascend along both sides, else by first appearance; numbers[i] is that
/// of the i-th least id. With ascending numbers, whether two ranges share a document is a comparison of their ends.
std::vector<std::int32_t> number_documents(const Ids& values, const IdRuns& q, const IdRuns& k) {
  std::vector<std::int32_t> numbers(values.size());
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = std::int32_t(i);
  if (ascending(q, values, numbers) && ascending(k, values, numbers)) return numbers;
  std::fill(numbers.begin(), numbers.end(), -1);
  std::int32_t next = 0;
  for (const auto* runs : {&q, &k}) {
    for (const auto& run : *runs) {
      auto& number = numbers[place_of(values, run.id)];
      if (number < 0) number = next++;
    }
  }
  return numbers;
}

SideTable side_table(const IdRuns& runs, const Ids& values, const std::vector<std::int32_t>& numbers) {
  SideTable side;
  side.segments.reserve(runs.size());
  for (auto* of : {&side.segment_of, &side.document_of}) of->reserve(runs.empty() ? 0 : runs.back().end);
  for (const auto& run : runs) {
    const auto document = numbers[place_of(values, run.id)];
    const auto length = run.end - run.start;
    side.segment_of.insert(side.segment_of.end(), length, std::int32_t(side.segments.size()));
    side.document_of.insert(side.document_of.end(), length, document);
    side.segments.push_back({run.start, run.end, document, run.base});
  }
  if (ascending(runs, values, numbers)) return side;
  const auto n = side.segments.size();
  side.tree.resize(2 * n);
  for (std::size_t i = 0; i < n; ++i) side.tree[n + i] = {side.segments[i].document, side.segments[i].document};
  for (auto i = n - 1; i > 0; --i) {
    const auto &a = side.tree[2 * i], &b = side.tree[2 * i + 1];
    side.tree[i] = {std::min(a.least, b.least), std::max(a.largest, b.largest)};
  }
  return side;
}

/// same: both sides have the same entries.
DocumentTable table_of(IdRuns q, IdRuns k, Align align, OwnPieces own, bool same = false) {
  Ids values;
  values.reserve(q.size() + k.size());
  for (const auto* runs : {&q, &k}) {
    for (const auto& run : *runs) values.push_back(run.id);
  }
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
  const auto q_sizes = measure(q, values), k_sizes = measure(k, values);
  if (own.q) q = cut(q, *own.q);
  if (own.k) k = cut(k, *own.k);
  const auto numbers = number_documents(values, q, k);
  DocumentTable table;
  table.q = side_table(q, values, numbers);
  if (!same) table.k = side_table(k, values, numbers);
  table.same = same;
  table.axes.resize(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (numbers[i] >= 0) table.axes[numbers[i]] = axis_of(q_sizes[i], k_sizes[i], align);  // the call has entries of it
  }
  return table;
}

bool are_same(const TensorView& q, const TensorView& k) {
  return q.data == k.data && q.type == k.type && q.shape[0] == k.shape[0] && q.strides[0] == k.strides[0];
}

}  // namespace

DocumentSide SideTable::view() const {
  return {segment_of.data(), document_of.data(), segments.data(), tree.empty() ? nullptr : tree.data(),
          std::int32_t(segments.size())};
}

DocumentTable documents_of_ids(const TensorView& ids_q, const TensorView& ids_k, std::int64_t queries,
                               std::int64_t keys, Align align, OwnPieces own) {
  const bool same = are_same(ids_q, ids_k) && queries == keys && !own.q && !own.k;
  auto runs = runs_of_ids(ids_q, queries);
  auto runs_k = same ? runs : runs_of_ids(ids_k, keys);
  return table_of(std::move(runs), std::move(runs_k), align, own, same);
}

DocumentTable documents_of_lengths(const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k, std::int64_t keys,
                                   Align align, OwnPieces own) {
  const auto queries = integer_at(cu_seqlens_q, cu_seqlens_q.shape[0] - 1);
  const bool same = are_same(cu_seqlens_q, cu_seqlens_k) && queries == keys && !own.q && !own.k;
  return table_of(runs_of_lengths(cu_seqlens_q, queries), runs_of_lengths(cu_seqlens_k, keys), align, own, same);
}

DocumentTable document_of_pieces(OwnPieces own, const Axis& axis) {
  const auto runs_of = [](const Pieces& pieces) {
    const auto last = pieces.empty() ? Piece{} : pieces.back();
    return cut({{0, 0, std::int32_t(last.first + last.count)}}, pieces);
  };
  DocumentTable table;
  table.q = side_table(runs_of(*own.q), {0}, {0});
  table.k = side_table(runs_of(*own.k), {0}, {0});
  table.axes = {axis};
  return table;
}

}  // namespace anyflash::rules
