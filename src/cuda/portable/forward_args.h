// Arguments of the forward kernels. Made by forward.cpp.
#pragma once

#include <cstdint>

#include "cuda/portable/args.h"

namespace anyflash::cuda {

/// Where keys and values lie in pages.
struct PageTable {
  const std::int32_t* table;
  std::int64_t batch, page;
  std::int32_t page_size, pages;

  /// Page `n` of batch entry b. Page numbers are not checked; one that does not exist counts as the first page.
  ANYFLASH_HD const std::int32_t* address(std::int32_t b, std::int32_t n) const { return table + b * batch + n * page; }
  ANYFLASH_HD std::int64_t at(std::int32_t b, std::int32_t n) const { return within(*address(b, n)); }
  ANYFLASH_HD std::int64_t within(std::int32_t found) const { return found >= 0 && found < pages ? found : 0; }
};

struct ForwardArgs {
  Rows q, k, v, out;
  PageTable pages;
  Numbers lse, row_sum, row_max;  // in the computation's type
  Numbers bias, alibi, sink;
  rules::Grid query_grid, key_grid;
  const DeviceGroup* groups;  // [batch group][head group]
  std::int32_t batch_groups, head_groups;
  std::int32_t heads, group_heads;  // query heads, and how many of them share a key head
  std::int32_t dimensions, d_qk, d_v;
  std::int32_t query_blocks, block_parts, value_parts;  // a thread block takes a part of a query block and of d_v
  std::int32_t tasks;         // such parts over all heads; a rarely needed launch has fewer thread blocks
  bool query_rows, key_rows;  // a block's rows are consecutive: one dimension, without a step
  bool paged;
  bool whole_channels;  // channels of q, k and v fill whole vectors
  bool plain_keys;      // key_rows, not paged, whole channels, vectors of k and v
  double scale, softcap;
  double unit, lag;  // the unit of exponential(), and how much a row's shift may lag behind its maximum
  float unit32, lag32;
  std::int32_t* only_if;  // results are computed only if this is not 0; then clear_counters(); null: always
  // For kBlocksAgain: (batch, heads, query blocks, notes). Those query blocks that have a note that is not 0.
  const std::uint8_t* only_blocks;
  std::int32_t notes;

  ANYFLASH_HD bool wants_statistics() const { return lse.data || row_sum.data || row_max.data; }
};

}  // namespace anyflash::cuda
