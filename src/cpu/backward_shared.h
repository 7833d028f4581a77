// Shared by all tasks of one backward call: the problem, the plan, and the row terms.
#pragma once

#include <cstdint>

#include "cpu/workspace.h"
#include "plan/plan.h"
#include "problem/problem.h"

namespace anyflash::cpu {

/// Row terms: numbers of each query row, computed once, in block order: row r of query block i of (b, h) is at(b, h, i)
/// + r.
template <class T>
struct RowTerms {
  std::int64_t heads = 0, blocks = 0;
  T* lse;               // 0 for dead rows
  T* rest;              // lse remainder: exact lse - lse; 0 where |lse| < tuning::kFarLse
  T *delta, *dlse;      // delta = dO . O; not used for dead rows
  std::uint64_t* live;  // a query block's rows that have a gradient: they exist and have lse > -inf
  double* sink;         // a query block's share of dSink

  RowTerms(const Problem& problem, const ExecutionPlan& plan, Parts& parts)
      : heads(problem.heads_q), blocks(plan.query_grid.count()) {
    const auto count = problem.batch * heads * blocks;
    lse = parts.take<T>(count * kTile);
    rest = parts.take<T>(count * kTile);
    delta = parts.take<T>(count * kTile);
    dlse = parts.take<T>(count * kTile);
    live = parts.take<std::uint64_t>(count);
    sink = parts.take<double>(problem.dsink.given() ? count : 0);
  }
  std::int64_t block(std::int64_t b, std::int64_t h, std::int64_t i) const { return (b * heads + h) * blocks + i; }
  std::int64_t at(std::int64_t b, std::int64_t h, std::int64_t i) const { return block(b, h, i) * kTile; }
};

}  // namespace anyflash::cpu
