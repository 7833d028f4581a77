// Arguments of the backward kernels. Made by backward.cpp.
#pragma once

#include <cstdint>

#include "cuda/portable/args.h"

namespace anyflash::cuda {

/// Queries with q and dout, or keys with k and v. Blocks are boxes of 64 entries.
struct BackwardSide {
  Rows rows[2];
  Rows gradients[2];  ///< of q, of k and v; data null: not wanted
  rules::Grid grid;
  std::int32_t blocks, heads;
  bool plain;  ///< a block's rows are consecutive: one dimension, without a step
};

/// Row terms: numbers of each query row, in the workspace, in the computation's type. They are in block order: row r of
/// query block i of (b, h) is at ((b * heads + h) * blocks + i) * 64 + r.
struct RowTerms {
  void *lse, *delta, *dlse;     ///< delta = dO . O
  void* rest;                   ///< lse remainder: exact lse - lse, 0 where lse is small (backward_lse_remainders.cuh).
                                ///< It has one block more, for tiles of two query blocks
  std::uint64_t* live;          ///< of each query block: rows with a gradient, those that exist and have lse > -inf
  std::uint64_t* large_lse;     ///< of each query block: rows with |lse| >= kLargeLse, which need a remainder
  double* sink;                 ///< of each query block: its share of dsink
  std::int32_t* any_large_lse;  ///< becomes 1 if there is such a row; null: not needed
};

/// From this |lse| on its rounding error makes P = exp(S - lse) inaccurate, so that a row needs the lse remainder.
template <class E>
constexpr float kLargeLse = sizeof(E) == 2 ? 1024 : 32;

struct BackwardArgs {
  BackwardSide sides[2];  // queries, keys
  Rows out;
  Numbers lse, dlse;  // in the computation's type
  RowTerms terms;
  Numbers bias, alibi, sink, dbias, dsink;
  std::int32_t bias_size[4];
  const DeviceGroup* groups;  // [batch group][head group]
  std::int32_t batch_groups, head_groups;
  std::int32_t batch, group_heads;       // query heads that share a key head
  std::int32_t dimensions, channels[2];  // d_qk, d_v
  std::int64_t key_tasks, query_tasks;   // of the gradients of keys and of queries; the bias's tasks follow
  std::int64_t tasks;                    // a rarely needed launch has fewer thread blocks than tasks
  bool general;                          // scores need more than a scale
  double scale, softcap;
  const std::int32_t* only_if;  ///< gradients are computed only if this is not 0; null: always
};

}  // namespace anyflash::cuda
