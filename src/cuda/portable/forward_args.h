// What the forward kernels are given. Made by forward.cpp.
#pragma once

#include <cstdint>

#include "cuda/portable/args.h"

namespace anyflash::cuda {

/// Where keys and values lie in pages.
struct PageTable {
  const std::int32_t* table;
  std::int64_t batch, page;
  std::int32_t page_size, pages;

  /// Page `page` of batch entry b. One that does not exist, which nobody can tell before, counts as the first.
  ANYFLASH_HD std::int64_t at(std::int32_t b, std::int32_t n) const { return within(table[b * batch + n * page]); }
  ANYFLASH_HD std::int64_t within(std::int32_t found) const { return found >= 0 && found < pages ? found : 0; }
};

struct ForwardArgs {
  Rows q, k, v, out;
  PageTable pages;
  Numbers lse, row_sum, row_max;  // in the type that is computed in
  Numbers bias, alibi, sink;
  rules::Grid query_grid, key_grid;
  const DeviceGroup* groups;  // [batch group][head group]
  std::int32_t batch_groups, head_groups;
  std::int32_t heads, group_heads;  // query heads, and those of them that share a key head
  std::int32_t dimensions, d_qk, d_v;
  std::int32_t query_blocks, block_parts, value_parts;  // a block of the grid takes a part of a query block and of d_v
  std::int32_t tasks;         // such parts of all heads; a launch that is rarely needed has fewer blocks of threads
  bool query_rows, key_rows;  // blocks are plain rows: of a sequence of one dimension, without a step
  bool paged;
  bool whole_channels;  // those of q, k and v fill whole vectors
  bool plain_keys;      // key_rows, not paged, whole channels, vectors of k and v
  double scale, softcap;
  double unit, lag;  // of exponential(), and how far a row's shift may lie below its maximum
  float unit32, lag32;
  const std::int32_t* only_if;      // results are made only if this is not 0; null: they are
  const std::uint8_t* only_blocks;  // of kBlocksAgain: (batch, heads, query blocks), those that are not 0

  ANYFLASH_HD bool wants_statistics() const { return lse.data || row_sum.data || row_max.data; }
};

}  // namespace anyflash::cuda
