// Problems without tensors, random rules, and the definition laid out as a matrix.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "../random.h"
#include "plan/facts.h"
#include "plan/plan.h"
#include "rules/sees.h"

namespace anyflash::planning {

struct Case {
  Rule rule;
  int dimensions = 1;
  Int3 q_size{}, k_size{};
  Align align = Align::none_front;
  Direction direction = Direction::forward;
};

inline Problem problem_of(const Case& c) {
  Problem problem;
  problem.direction = c.direction;
  problem.batch = problem.heads_q = problem.heads_kv = 1;
  problem.d_qk = problem.d_v = 64;
  problem.dimensions = c.dimensions;
  problem.q_size = c.q_size;
  problem.k_size = c.k_size;
  problem.align = c.align;
  problem.rule = c.rule;
  problem.threads = 2;
  return problem;
}

inline Problem problem_1d(const Rule& rule, std::int32_t queries, std::int32_t keys) {
  return problem_of({rule, 1, {{1, 1, queries}}, {{1, 1, keys}}});
}

/// What a CPU's kernels take, with a plausible cost.
inline TileMenu test_menu() { return {{64, 128, 256}, 64, 600.0}; }

/// The class of every (query block, key block), from runs; checks that they ascend, are disjoint and stay in the grid.
inline std::vector<TileClass> class_matrix(const RunList& list, std::int64_t rows, std::int64_t columns) {
  std::vector<TileClass> classes(rows * columns, TileClass::skip);
  EXPECT_EQ(std::int64_t(list.start.size()), rows + 1);
  EXPECT_EQ(list.start.front(), 0);
  EXPECT_EQ(list.start.back(), std::int64_t(list.runs.size()));
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t next = 0;
    for (auto r = list.start[row]; r < list.start[row + 1]; ++r) {
      const auto& run = list.runs[r];
      EXPECT_GT(run.count, 0);
      EXPECT_NE(run.kind, TileClass::skip);
      EXPECT_GE(run.first, next);
      const bool adjacent = r > list.start[row] && run.first == next;
      EXPECT_FALSE(adjacent && run.kind == list.runs[r - 1].kind) << "runs not merged";
      next = std::int64_t(run.first) + run.count;
      EXPECT_LE(next, columns);
      for (auto k = run.first; k < std::min(next, columns); ++k) classes[row * columns + k] = run.kind;
    }
  }
  return classes;
}

inline std::int64_t visited_pairs(const ExecutionPlan& plan) {
  std::int64_t tiles = 0;
  for (const auto& run : plan.groups[0].keys_of_query_block.runs) tiles += run.count;
  return tiles * rules::volume(plan.query_grid.extent) * rules::volume(plan.key_grid.extent);
}

class RandomRules {
 public:
  explicit RandomRules(unsigned seed) : random_(testing::seed_of(seed)) {}
  /// Rules that go by the difference of coordinates, on sequences `longer` times as long.
  static RandomRules of_differences(unsigned seed, int longer) {
    RandomRules rules(seed);
    rules.last_atom_ = 3;
    rules.longer_ = longer;
    return rules;
  }

  std::int64_t number(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }

  Rule rule(int depth) {
    if (depth == 0 || number(0, 3) == 0) return atom();
    switch (number(0, 2)) {
      case 0: return rule(depth - 1) & rule(depth - 1);
      case 1: return rule(depth - 1) | rule(depth - 1);
      default: return ~rule(depth - 1);
    }
  }

  Case next(int depth) {
    Case c;
    c.rule = rule(depth);
    c.dimensions = int(number(1, 3));
    const std::int64_t most[] = {500 * longer_, 26 * longer_, 9 * longer_};
    for (int i = 0; i < 3; ++i) {
      const bool used = i >= 3 - c.dimensions;
      c.q_size[i] = used ? std::int32_t(number(1, most[c.dimensions - 1])) : 1;
      c.k_size[i] = used ? (number(0, 1) ? c.q_size[i] : std::int32_t(number(1, most[c.dimensions - 1]))) : 1;
    }
    c.align = Align(number(0, 3));
    c.direction = number(0, 1) ? Direction::forward : Direction::backward;
    return c;
  }

 private:
  Rule atom() {
    switch (number(0, last_atom_)) {
      case 0: return full();
      case 1: return causal();
      case 2: return local(number(1, 20), int(number(0, 4)), number(0, 1));
      case 3: return window(number(-1, 30), number(-1, 30));
      case 4: return prefix(number(0, 100));
      case 5: return sink(number(0, 100));
      case 6: return tiles(number(1, 20), 2 * number(0, 2) + 1);
      case 7: return prefix_queries(number(0, 100));
      default: return neighbourhood(number(1, 12), number(1, 5), number(0, 1));
    }
  }

  std::mt19937 random_;
  int last_atom_ = 8, longer_ = 1;
};

}  // namespace anyflash::planning
