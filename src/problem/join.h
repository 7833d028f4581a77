// Two results over different keys that are to become one.
#pragma once

#include <anyflash/join.h>

#include "problem/problem.h"

namespace anyflash {

/// out, row_sum and row_max over some keys.
struct PartialResult {
  ElementType type;  ///< of out
  Operand out;
  RowStatistic row_sum, row_max;
};

struct JoinProblem {
  Device device;
  void* stream;
  int threads;
  std::int64_t batch, heads, queries, channels, size[3];  ///< size: of the sequence, as in Operand::sequence
  PartialResult into, part;

  bool is_float64() const { return part.type == ElementType::float64; }
};

/// Throws Error unless the two fit each other.
JoinProblem join_problem(const ForwardOutputs& into, const ForwardOutputs& part, void* stream, std::int64_t threads);

}  // namespace anyflash
