// Document tables: which document each entry belongs to, in the form that a program needs.
#pragma once

#include <anyflash/attention.h>
#include <anyflash/sharding.h>

#include <vector>

#include "rules/axis.h"
#include "rules/program.h"

namespace anyflash::rules {

/// One side's entries, their segments, and a search tree over the segments where the document numbers do not ascend.
struct SideTable {
  std::vector<std::int32_t> segment_of, document_of;  ///< document_of: empty if each segment has its document's number
  std::vector<Segment> segments;
  std::vector<DocumentRange> tree;

  DocumentSide view() const;
};

struct DocumentTable {
  // The ids' first entries: tables are shared by programs made of the same ids.
  const void *made_of_q = nullptr, *made_of_k = nullptr;
  std::int64_t keys = 0, own_keys = 0;  // of the whole sequence, and of the call
  SideTable q, k;
  bool same = false;  // k is as q, and empty
  std::vector<Axis> axes;

  Documents view() const { return {q.view(), (same ? q : k).view(), axes.data()}; }
};

/// The pieces of both sides that a call has; null: all entries.
struct OwnPieces {
  const Pieces *q = nullptr, *k = nullptr;
};

/// ids of one batch entry: the first `queries` (`keys`) entries of ids_q (ids_k), which are rank 1, int32 or int64.
DocumentTable documents_of_ids(const TensorView& ids_q, const TensorView& ids_k, std::int64_t queries,
                               std::int64_t keys, Align align, OwnPieces own = {});

/// Cumulative lengths, checked. Keys from `keys` on do not exist.
DocumentTable documents_of_lengths(const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k, std::int64_t keys,
                                   Align align, OwnPieces own = {});

/// The pieces of sequences that are one document, whose frame is `axis`.
DocumentTable document_of_pieces(OwnPieces own, const Axis& axis);

}  // namespace anyflash::rules
