// What the kernels of few queries are given. Made by decode.cpp.
#pragma once

#include "cuda/portable/forward_args.h"

namespace anyflash::cuda {

/// A part is some of the key blocks that are visited; the last one takes what is left. What parts leave, for each
/// (batch, key head, part, row): the result so far in d_v numbers; its largest product, its sum, and whether the row
/// saw a key.
struct DecodeArgs {
  ForwardArgs call;
  bool general;              // scores need more than a positive scale
  std::int32_t queries;      // of a head
  std::int32_t rows;         // the queries of all heads that share a key head
  std::int32_t row_parts;    // blocks of threads that share them
  std::int32_t parts, part_blocks;
  char *results, *statistics;  // null: one part

  static constexpr int most_parts = 128;
};

}  // namespace anyflash::cuda
