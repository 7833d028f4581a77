// Shared by all tasks of one backward call: the problem, the plan, and the row terms.
#pragma once

#include <cstdint>

#include "cpu/walk.h"
#include "cpu/workspace.h"
#include "plan/plan.h"
#include "problem/problem.h"

namespace anyflash::cpu {

/// What one step of a backward pass computes: some heads of some groups (batch entry, key/value head), for these a range
/// of query blocks and a range of key blocks.
struct BackwardRange {
  std::int64_t first_group, groups;
  std::int64_t first_head, heads;  ///< of each group
  BlockRange queries, keys;
  bool first = true, last = true;  ///< dK and dV begin with this step; they are complete after it
};

/// Row terms: numbers of each query row of a range, computed once, in block order: row r of query block i of (b, h) is
/// at(b, h, i) + r. With several groups the range has all their heads.
template <class T>
struct RowTerms {
  std::int64_t heads = 0, blocks = 0;
  std::int64_t first_head = 0, first_block = 0, blocks_in_range = 0;
  T* lse;               // 0 for dead rows
  T* rest;              // lse remainder: exact lse - lse; 0 where |lse| < tuning::kFarLse
  T *delta, *dlse;      // delta = dO . O; not used for dead rows
  std::uint64_t* live;  // a query block's rows that have a gradient: they exist and have lse > -inf
  double* sink;         // a query block's share of dSink

  RowTerms(const Problem& problem, const ExecutionPlan& plan, const BackwardRange& range, Parts& parts)
      : heads(problem.heads_q),
        blocks(plan.query_grid.count()),
        first_head(range.first_group * (problem.heads_kv ? problem.heads_q / problem.heads_kv : 1) + range.first_head),
        first_block(range.queries.first),
        blocks_in_range(range.queries.count()) {
    const auto count = range.groups * range.heads * blocks_in_range;
    lse = parts.take<T>(count * kTile);
    rest = parts.take<T>(count * kTile);
    delta = parts.take<T>(count * kTile);
    dlse = parts.take<T>(count * kTile);
    live = parts.take<std::uint64_t>(count);
    sink = parts.take<double>(problem.dsink.given() ? count : 0);
  }
  std::int64_t block(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return (b * heads + h - first_head) * blocks_in_range + (i - first_block);
  }
  std::int64_t at(std::int64_t b, std::int64_t h, std::int64_t i) const { return block(b, h, i) * kTile; }
  /// A number for the block, different from that of any other block of the call.
  std::int64_t name(std::int64_t b, std::int64_t h, std::int64_t i) const { return (b * heads + h) * blocks + i; }
  /// Makes a range of one block that of (b, h, i).
  void move_to(std::int64_t b, std::int64_t h, std::int64_t i) { first_head = b * heads + h, first_block = i; }
};

}  // namespace anyflash::cpu
