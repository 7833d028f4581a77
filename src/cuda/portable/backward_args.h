// What the backward kernels are given. Made by backward.cpp.
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
  bool plain;  ///< blocks are plain rows: of a sequence of one dimension, without a step
};

/// Numbers of each query row, in block order: row r of query block i of (b, h) is ((b * heads + h) * blocks + i) * 64 +
/// r. In the workspace, in the type that is computed in.
struct RowTerms {
  void *lse, *delta, *dlse;  ///< delta = dO . O
  void* rest;                ///< what lse lacks of the true one; 0 where it is small enough to be exact; a block more,
                             ///< of no queries, for tiles of two query blocks
  std::uint64_t* live;       ///< of each query block: the rows that have a gradient, those inside with lse > -inf
  std::uint64_t* far;        ///< of each query block: the rows whose rest has to be found (backward_rests.cuh)
  double* sink;              ///< of each query block: its share of dsink
  std::int32_t* any_far;     ///< becomes 1 if there is such a row; null: nobody asks
};

/// From here on, either way, P = exp(S - lse) may be off by the rounding of lse: it is summed first.
template <class E>
constexpr float kFarLse = sizeof(E) == 2 ? 1024 : 32;

struct BackwardArgs {
  BackwardSide sides[2];  // queries, keys
  Rows out;
  Numbers lse, dlse;  // in the type that is computed in
  RowTerms terms;
  Numbers bias, alibi, sink, dbias, dsink;
  std::int32_t bias_size[4];
  const DeviceGroup* groups;  // [batch group][head group]
  std::int32_t batch_groups, head_groups;
  std::int32_t batch, group_heads;       // query heads that share a key head
  std::int32_t dimensions, channels[2];  // d_qk, d_v
  std::int64_t key_tasks, query_tasks;   // of the tasks, which are these, and then those of the bias
  std::int64_t tasks;                    // a launch that is rarely needed has fewer blocks of threads
  bool general;                          // scores need more than a scale
  double scale, softcap;
  const std::int32_t* only_if;  ///< the gradients are made only if this is not 0; null: they are
};

}  // namespace anyflash::cuda
