// What the backward kernels of Hopper are given: plain numbers and device pointers, passed by value.
#pragma once

#include "cuda/portable/forward_args.h"

namespace anyflash::cuda {

/// Of a row of queries: P = 2^(S unit + shift), dS = P (dP - delta).
struct GroupBackwardArgs {
  Rows q, k, v, grad_out, grad_k, grad_v;  // 16-byte vectors all
  Rows grad_q;
  const float *shift, *delta;  ///< [batch][head][query block][row]; a row that sees no key: -inf and 0
  float* sums;                 ///< of dQ: [batch][head][query block], each as backward_sums.cuh says, zero at first
  const DeviceGroup* groups;   ///< [batch group][head group]; runs of query blocks, words of keys' rows
  rules::Grid query_grid, key_grid;
  rules::Int3 query_size, key_size;
  std::int32_t batch_groups, head_groups;
  std::int32_t heads, group_heads;  ///< query heads, and those of them that share a key head
  std::int32_t d_qk, d_v;
  std::int32_t query_blocks, key_blocks;
  bool query_rows, key_rows;  ///< blocks are plain rows: of a sequence of one dimension, without a step
  float scale, unit;          ///< unit: scale times log2(e)
};

}  // namespace anyflash::cuda
