// What the kernels of few queries are given. Made by decode.cpp.
#pragma once

#include "cuda/common/late_masks.h"
#include "cuda/portable/forward_args.h"
#include "rules/bits.h"

namespace anyflash::cuda {

/// A part is some of the key blocks that are visited; the last one takes what is left. What parts leave, for each
/// (batch, key head, part, row): the result so far in d_v numbers; its largest product, its sum, and whether the row
/// saw a key.
struct DecodeArgs {
  ForwardArgs call;
  bool general;            // scores need more than a positive scale
  std::int32_t queries;    // of a head
  std::int32_t rows;       // the queries of all heads that share a key head
  std::int32_t row_parts;  // tasks that share them
  std::int32_t parts, part_blocks;
  // (batch, key head, part, row part, part of the values), which blocks of threads take in turns.
  std::int32_t tasks;
  char *results, *statistics;  // null: one part

  std::int32_t keys;  // that there are, of the longest batch entry

  // Every query sees all keys of its batch entry, and that may have fewer: `lengths` says how many, or its mask.
  bool by_length, length_in_mask;
  Integers lengths;

  // For the kernel of plain calls, where that is not so: all queries see the same key blocks, first_block to
  // end_block - 1, and all keys of each but of `partial` (-1: none).
  static constexpr int partial_blocks = 2;
  std::int32_t first_block, end_block, partial[partial_blocks];
  rules::Word words[partial_blocks];

  static constexpr int most_parts = 128;
};

}  // namespace anyflash::cuda
