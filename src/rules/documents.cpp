#include "rules/documents.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "problem/tensor.h"
#include "rules/id_runs.h"

namespace anyflash::rules {
namespace {

/// A segment of equal ids. document: the same number on both sides. base: entries of the document before it.
struct IdRun {
  std::int64_t id;
  std::int32_t start, end, base = 0, document = 0;
};
using IdRuns = std::vector<IdRun>;

template <typename T>
IdRuns runs_of_ids(const T* ids, std::int64_t stride, std::int64_t count) {
  IdRuns runs;
  for (std::int64_t i = 0, end = 0; i < count; i = end) {
    end = end_of_run(ids, stride, count, i);
    runs.push_back({std::int64_t(ids[i * stride]), std::int32_t(i), std::int32_t(end)});
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

/// Finds the bases; returns the length of each document.
std::vector<std::int64_t> measure(IdRuns& runs, std::int32_t documents) {
  std::vector<std::int64_t> sizes(documents);
  for (auto& run : runs) {
    auto& size = sizes[run.document];
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
      own.push_back({at->id, std::int32_t(start + moved), std::int32_t(end + moved),
                     std::int32_t(at->base + start - at->start), at->document});
    }
    place += count;
  }
  return own;
}

bool ids_ascend(const IdRuns& runs) {
  return std::is_sorted(runs.begin(), runs.end(), [](const IdRun& a, const IdRun& b) { return a.id < b.id; });
}

/// Numbers documents by their ids, which ascend along both sides.
std::int32_t number_in_order(IdRuns& q, IdRuns& k) {
  std::int32_t documents = 0;
  for (auto a = q.begin(), b = k.begin(); a != q.end() || b != k.end(); ++documents) {
    const auto id = a == q.end() || (b != k.end() && b->id < a->id) ? b->id : a->id;
    for (; a != q.end() && a->id == id; ++a) a->document = documents;
    for (; b != k.end() && b->id == id; ++b) b->document = documents;
  }
  return documents;
}

/// Numbers documents as they appear, by a hash table with open addressing.
std::int32_t number_as_they_appear(IdRuns& q, IdRuns& k) {
  const auto slots = std::bit_ceil(2 * (q.size() + k.size()) + 1);
  std::vector<std::int32_t> document_in(slots, -1);
  std::vector<std::int64_t> id_of;
  for (auto* runs : {&q, &k}) {
    for (auto& run : *runs) {
      auto hash = std::uint64_t(run.id) * 0x9e3779b97f4a7c15;
      hash = (hash ^ hash >> 32) * 0xd6e8feb86659fd93;
      auto slot = (hash ^ hash >> 32) & (slots - 1);
      while (document_in[slot] >= 0 && id_of[document_in[slot]] != run.id) slot = (slot + 1) & (slots - 1);
      if (document_in[slot] < 0) {
        document_in[slot] = std::int32_t(id_of.size());
        id_of.push_back(run.id);
      }
      run.document = document_in[slot];
    }
  }
  return std::int32_t(id_of.size());
}

/// Numbers documents: by value if ids ascend along both sides, else as they appear. Returns how many there are. With
/// ascending numbers, whether two ranges share a document is a comparison of their ends.
std::int32_t number_documents(IdRuns& q, IdRuns& k) {
  return ids_ascend(q) && ids_ascend(k) ? number_in_order(q, k) : number_as_they_appear(q, k);
}

SideTable side_table(const IdRuns& runs) {
  SideTable side;
  const auto entries = std::size_t(runs.empty() ? 0 : runs.back().end);
  bool ascending = true, numbered = true;  // numbered: a segment has its document's number
  std::int32_t before = 0;
  side.segments.reserve(runs.size());
  side.segment_of.resize(entries);
  for (const auto& run : runs) {
    const auto segment = std::int32_t(side.segments.size());
    std::fill(side.segment_of.begin() + run.start, side.segment_of.begin() + run.end, segment);
    side.segments.push_back({run.start, run.end, run.document, run.base});
    numbered &= run.document == segment;
    ascending &= run.document >= before;
    before = run.document;
  }
  if (!numbered) {
    side.document_of.resize(entries);
    for (const auto& run : runs)
      std::fill(side.document_of.begin() + run.start, side.document_of.begin() + run.end, run.document);
  }
  if (ascending) return side;
  const auto n = side.segments.size();
  side.tree.resize(2 * n);
  for (std::size_t i = 0; i < n; ++i) side.tree[n + i] = {side.segments[i].document, side.segments[i].document};
  for (auto i = n - 1; i > 0; --i) {
    const auto &a = side.tree[2 * i], &b = side.tree[2 * i + 1];
    side.tree[i] = {std::min(a.least, b.least), std::max(a.largest, b.largest)};
  }
  return side;
}

/// same: both sides have the same entries, and k is empty.
DocumentTable table_of(IdRuns q, IdRuns k, Align align, OwnPieces own, bool same = false) {
  auto documents = number_documents(q, k);
  const auto q_sizes = measure(q, documents), k_sizes = same ? q_sizes : measure(k, documents);
  if (own.q) q = cut(q, *own.q);
  if (own.k) k = cut(k, *own.k);
  std::vector<std::int32_t> of_whole(documents);
  for (std::int32_t i = 0; i < documents; ++i) of_whole[i] = i;
  if (own.q || own.k) {  // of these documents the call may have few, in another order
    const auto whole_q = q, whole_k = k;
    documents = number_documents(q, k);
    for (std::size_t i = 0; i < q.size(); ++i) of_whole[q[i].document] = whole_q[i].document;
    for (std::size_t i = 0; i < k.size(); ++i) of_whole[k[i].document] = whole_k[i].document;
  }
  DocumentTable table;
  table.q = side_table(q);
  if (!same) table.k = side_table(k);
  table.same = same;
  table.axes.reserve(documents);
  for (std::int32_t i = 0; i < documents; ++i)
    table.axes.push_back(axis_of(q_sizes[of_whole[i]], k_sizes[of_whole[i]], align));
  return table;
}

bool are_same(const TensorView& q, const TensorView& k) {
  return q.data == k.data && q.type == k.type && q.shape[0] == k.shape[0] && q.strides[0] == k.strides[0];
}

}  // namespace

DocumentSide SideTable::view() const {
  return {segment_of.data(), document_of.empty() ? segment_of.data() : document_of.data(), segments.data(),
          tree.empty() ? nullptr : tree.data(), std::int32_t(segments.size())};
}

DocumentTable documents_of_ids(const TensorView& ids_q, const TensorView& ids_k, std::int64_t queries,
                               std::int64_t keys, Align align, OwnPieces own) {
  const bool same = are_same(ids_q, ids_k) && queries == keys && !own.q && !own.k;
  auto runs = runs_of_ids(ids_q, queries);
  auto runs_k = same ? IdRuns() : runs_of_ids(ids_k, keys);
  return table_of(std::move(runs), std::move(runs_k), align, own, same);
}

DocumentTable documents_of_lengths(const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k, std::int64_t keys,
                                   Align align, OwnPieces own) {
  const auto queries = integer_at(cu_seqlens_q, cu_seqlens_q.shape[0] - 1);
  const bool same = are_same(cu_seqlens_q, cu_seqlens_k) && queries == keys && !own.q && !own.k;
  return table_of(runs_of_lengths(cu_seqlens_q, queries), same ? IdRuns() : runs_of_lengths(cu_seqlens_k, keys), align,
                  own, same);
}

DocumentTable document_of_pieces(OwnPieces own, const Axis& axis) {
  const auto runs_of = [](const Pieces& pieces) {
    const auto last = pieces.empty() ? Piece{} : pieces.back();
    return cut({{0, 0, std::int32_t(last.first + last.count)}}, pieces);
  };
  DocumentTable table;
  table.q = side_table(runs_of(*own.q));
  table.k = side_table(runs_of(*own.k));
  table.axes = {axis};
  return table;
}

}  // namespace anyflash::rules
