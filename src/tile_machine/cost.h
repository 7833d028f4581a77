// Cycles of what a tile does. Planner and executor count by the same functions; the planner counts what it expects, the
// executor what it does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tile_machine/mapping.h"

namespace anyflash::simulator {

/// Rows are shared by the tile's workers.
inline std::int64_t even_rows(const TileMachine& machine, std::int64_t rows) {
  return (rows + machine.workers - 1) / machine.workers * machine.workers;
}
/// One operation on each of `numbers` numbers of each row.
inline double vector_cycles(const TileMachine& machine, ElementType type, std::int64_t rows, std::int64_t numbers) {
  return double(even_rows(machine, rows)) * double(numbers) /
         (type == ElementType::float32 ? machine.vector_per_cycle_float32 : machine.vector_per_cycle);
}
inline double exp_cycles(const TileMachine& machine, ElementType type, std::int64_t rows, std::int64_t numbers) {
  return double(even_rows(machine, rows)) * double(numbers) /
         (type == ElementType::float32 ? machine.exp_per_cycle_float32 : machine.exp_per_cycle);
}
/// Products and other operations, one after the other or side by side.
inline double both_cycles(const TileMachine& machine, double products, double others) {
  return machine.separate_vector ? std::max(products, others) : products + others;
}
/// Operations on a score in the forward pass: scale, maximum, subtraction, sum.
constexpr int forward_score_operations = 4;

class Cost {
 public:
  explicit Cost(const Call& call) : call_(call), machine_(call.machine) {
    const auto& problem = call.problem;
    const bool cap = problem.softcap > 0;
    score_exps_ = 1 + (cap ? 1 : 0);
    // Backward: scale, subtraction of lse and delta, two products.
    score_operations_ = (call.backward ? 5 : forward_score_operations) + (cap ? (call.backward ? 8 : 5) : 0) +
                        (problem.bias.given() ? 1 : 0) + (problem.alibi.given() ? 3 * problem.dimensions : 0);
  }

  /// A step of `rows` queries and `keys` keys.
  double step(std::int64_t rows, std::int64_t keys, bool partial) const {
    const auto d_qk = call_.d_qk, d_v = call_.d_v;
    double products = product(rows, keys, d_qk), others = 0;
    if (call_.backward) {
      products +=
          product(rows, keys, d_v) + product(keys, d_v, rows) + product(keys, d_qk, rows) + product(rows, d_qk, keys);
    } else {
      products += product(rows, d_v, keys);
      others += vector(rows, d_v);
    }
    others += exp_cycles(machine_, call_.problem.type, rows, keys) * score_exps_;
    others += vector(rows, keys) * (score_operations_ + (partial ? 1 : 0));
    return both_cycles(machine_, products, others);
  }
  /// Backward: a step that sums P alone.
  double sum_step(std::int64_t rows, std::int64_t keys, bool partial) const {
    const double others = exp_cycles(machine_, call_.problem.type, rows, keys) * score_exps_ +
                          vector(rows, keys) * (score_operations_ - 2 + (partial ? 1 : 0));
    return both_cycles(machine_, product(rows, keys, call_.d_qk), others);
  }
  /// Query chunks that see all of a key chunk are one step, if they are neighbours on the tile: of so many rows that the
  /// start of its products is a twentieth of them.
  std::int64_t worthwhile_rows(std::int64_t chunk_rows, std::int64_t chunk_keys) const {
    if (call_.problem.bias.given() || call_.problem.alibi.given()) return chunk_rows;
    constexpr double worth = 20;
    const double one = product(machine_.unit_rows, chunk_keys, call_.d_qk);
    const double more = (product(2 * machine_.unit_rows, chunk_keys, call_.d_qk) - one) / double(machine_.unit_rows);
    const double start = one - more * double(machine_.unit_rows);
    return std::max(chunk_rows, std::int64_t(worth * start / more));
  }
  double lse_remainders(std::int64_t rows, std::int64_t columns) const { return vector(rows, columns + 2); }
  /// Forward: rows of results, normalized. Backward: rows of dq, rounded to their type.
  double finish_rows(std::int64_t rows) const { return vector(rows, call_.backward ? call_.d_qk : call_.d_v); }
  /// Partial results of `parts` tiles become one, and are finished.
  double combine(std::int64_t rows, std::int64_t parts) const {
    const auto one = call_.backward ? vector(rows, call_.d_qk) : 2 * vector(rows, call_.d_v + 2);
    return double(parts - 1) * one + finish_rows(rows);
  }
  /// Backward: the sum of dout * out of each row.
  double row_sums(std::int64_t rows) const { return 2 * vector(rows, call_.d_v); }
  /// Backward: partial dk and dv of another tile are added.
  double add_keys(std::int64_t rows) const { return vector(rows, call_.d_qk + call_.d_v); }
  /// Backward: dk and dv are rounded to their type.
  double finish_keys(std::int64_t rows) const { return vector(rows, call_.d_qk + call_.d_v); }

  double exchange(double bytes) const { return bytes / machine_.exchange_bytes_per_cycle; }

 private:
  double product(std::int64_t m, std::int64_t n, std::int64_t k) const {
    return tile_product_cycles(machine_, call_.problem.type, m, n, k);
  }
  double vector(std::int64_t rows, std::int64_t numbers) const {
    return vector_cycles(machine_, call_.problem.type, rows, numbers);
  }

  const Call& call_;
  const TileMachine& machine_;
  double score_exps_, score_operations_;
};

}  // namespace anyflash::simulator
