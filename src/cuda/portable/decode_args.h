// Arguments of the decode kernels. Made by decode.cpp.
#pragma once

#include "cuda/common/device_masks.h"
#include "cuda/portable/forward_args.h"
#include "rules/bits.h"

namespace anyflash::cuda {

/// A part (split-KV) is some of the visited key blocks; the last part takes what is left. Each (batch, key head, part,
/// row) has a partial result: d_v numbers, the largest product, the sum, and whether the row saw a key.
struct DecodeArgs {
  ForwardArgs call;
  bool general;            // scores need more than a positive scale
  std::int32_t queries;    // per head
  std::int32_t rows;       // the queries of all heads that share a key head
  std::int32_t row_parts;  // tasks that share these rows
  std::int32_t parts, part_blocks;
  // The number of tasks: (batch, key head, part, row part, part of the values).
  std::int32_t tasks;
  char *results, *statistics;  // null: one part
  std::int32_t joined;         // the number of rows of all heads

  std::int32_t keys;  // number of keys of the longest batch entry

  // Every query sees all keys of its batch entry, which may have fewer keys: `lengths` or the mask tells how many.
  bool by_length, length_in_mask;
  Integers lengths;

  // For the plain kernel otherwise, and in_a_row: the queries see key blocks first_block to end_block - 1, and all keys
  // of each except the blocks in `partial` (-1: none).
  static constexpr int partial_blocks = 2;
  std::int32_t first_block, end_block, partial[partial_blocks];
  rules::Word words[partial_blocks];

  bool masked;    // not a plain call: each row has mask words of its own
  bool in_a_row;  // masked, but which blocks are visited need not be read from memory; `words` are 0

  static constexpr int most_parts = 128;
};

}  // namespace anyflash::cuda
