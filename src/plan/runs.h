// The key blocks that a query block visits, and the transpose.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "plan/document_blocks.h"
#include "plan/plan.h"

namespace anyflash::planning {

/// Finds the runs of a query block by bisection. A range of key blocks is classified as one box, and split only if it
/// is partial. So the work is the edge of the visible area times the logarithm of the length. Ranges are split where
/// the runs of earlier query blocks suggest the edges, else in the middle. If a rule depends only on coordinate
/// differences and hides the keys at both ends of the last dimension, a query block has the runs of the one before it,
/// moved. The result depends on neither. A copy is cheap and finds the same runs.
class RunFinder {
 public:
  /// k_size: keys that exist, at most key_grid.size. pad_queries: blocks with padding rows are partial, too.
  RunFinder(const rules::Program& program, const Grid& query_grid, const Grid& key_grid, Int3 k_size, bool pad_queries);

  /// Appends the runs of a query block, ascending and without overlap, neighbours of one kind merged.
  void find(std::int32_t query_block, std::vector<Run>& runs);

  std::int64_t questions() const { return questions_; }  ///< tile classes asked so far
  /// Are all runs read off documents, so that no tile class is asked?
  bool asks_nothing() const { return by_documents_; }

 private:
  void split_dimension(int i, TileClass known);
  void split_range(int i, std::int32_t residue, std::int32_t first, std::int32_t last, TileClass known, bool asked);
  void key_block(TileClass known);
  TileClass ask(std::int64_t first_block, std::int64_t end_block);
  TileClass ask_words(bool ragged) const;
  void append(std::int64_t first, std::int64_t count, TileClass kind);
  void expect();
  bool move_along();
  void read_bitmap();
  void read_documents();
  void read_documents_in_order();
  std::int32_t split_point(std::int64_t block, std::int64_t inner, std::int32_t chunks) const;
  void whole_dimension(int i);
  std::int32_t residue_of_keys(int i) const;

  const rules::Program& program_;
  const Grid query_grid_, key_grid_;
  const Int3 k_size_;
  const bool pad_queries_;
  Int3 chunks_{};
  std::int64_t inner_blocks_[3] = {};  // blocks of one index of dimension i
  bool inner_ragged_[4] = {};          // does any block extend beyond the keys in a dimension >= i? [3]: false
  bool bitmap_ = false;                // the rule is a bitmap alone, one bit of which covers a whole tile
  bool strided_[3] = {};               // every visible pair of dimension i is of one residue class of its step
  bool by_documents_ = false;          // the rule is documents, alone or, if both sides have the same, with causal
  bool causal_ = false;                // with causal
  std::int32_t shift_ = 0;             // key blocks by which runs move from one query block to the next; 0: unknown

  Box query_block_{}, queries_{}, keys_{};  // queries_, keys_: clipped to the sequence
  bool query_ragged_ = false, key_ragged_ = false;
  std::int32_t index_[3] = {};
  std::vector<Run>* runs_ = nullptr;
  std::size_t first_run_ = 0;
  std::int64_t questions_ = 0;

  std::vector<Run> before_last_, last_;  // the runs of the two query blocks before
  std::int64_t last_block_ = -1;         // the number of the latter
  std::vector<std::int64_t> expected_;   // a guess where those of this query block begin and end

  std::shared_ptr<const DocumentBlocks> documents_;  // if document numbers descend somewhere, or sides differ
  std::vector<BlockRange> meeting_;                  // blocks that hold a document of the query block
  std::size_t next_meeting_ = 0;
};

/// The runs of query blocks for each key block, from those of key blocks for each query block, in time linear in both.
RunList transpose(const RunList& forward, std::int64_t key_blocks);

/// How many key blocks any of up to three query blocks visits.
std::int64_t visited_by_any(const RunList& list, std::int64_t first, std::int64_t count);

}  // namespace anyflash::planning
