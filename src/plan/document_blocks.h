// The key blocks that share a document with some queries. Where ids come in any order, the least and the largest id of
// a block tell nothing. Asking each document for its blocks costs time in proportion to the answer.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace anyflash::planning {

/// Blocks first .. end - 1.
struct BlockRange {
  std::int64_t first, end;
};

/// The key blocks of each document of a program with documents. Made in time linear in the keys. A set of blocks is a
/// row of bits where there are few documents; where there are many, each has few blocks, and they are listed.
class DocumentBlocks {
 public:
  DocumentBlocks(const rules::Program& program, const Grid& key_grid);

  /// The key blocks that share a document with a box of queries, all of which exist: ascending, neither overlapping nor
  /// adjacent.
  void meeting(const Box& queries, std::vector<BlockRange>& found) const;

 private:
  using Word = std::uint64_t;
  struct Link {
    BlockRange blocks;
    std::int32_t next;  // of the same document, -1: none
  };
  struct Chain {
    std::int32_t first = -1, last = -1;
  };
  void add(std::int32_t document, std::int64_t block);
  void mark(std::int32_t document, std::vector<Word>& blocks) const;

  const rules::DocumentSide queries_;
  const Int3 q_size_;
  std::int64_t documents_ = 0, row_words_;  // with keys; of a set of key blocks
  std::vector<Word> rows_;                  // one per document, or empty
  std::vector<Chain> chains_;               // one per document, or empty
  std::vector<Link> links_;
};

}  // namespace anyflash::planning
