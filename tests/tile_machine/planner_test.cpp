// The planner beside a search through every mapping: all chunk counts up to 16, all grids, all numbers of chunks in
// flight, all numbers of waves. And no mapping that it chooses needs more memory than a tile has.
#include <anyflash/tile_machine.h>
#include <gtest/gtest.h>

#include "backends.h"
#include "tile_machine/planner.h"

namespace anyflash {
namespace {

struct Case {
  std::string rule;
  std::int64_t tiles, memory, heads;
  bool backward = false;
  std::int64_t entries = 192;
};

struct Planned {
  Problem problem;
  std::shared_ptr<const ExecutionPlan> plan;
  TileMachine machine;

  explicit Planned(const Case& one) {
    const TensorView q(nullptr, ElementType::float16, {1, one.heads, one.entries, 32}, Device{DeviceKind::tiles});
    Options options;
    if (one.rule == "causal") options.rule = causal();
    if (one.rule == "local") options.rule = local(32);
    problem = shape_problem(q, q, q, options, one.backward ? Direction::backward : Direction::forward);
    plan = make_plan(problem, backend_of(problem.device).menu(problem));
    machine.tiles = one.tiles, machine.memory_per_tile = one.memory;
  }
};

double best_of_all(const simulator::Call& call) {
  constexpr std::int64_t most_chunks = 16;
  double best = 0;
  simulator::Mapping m;
  m.turns = call.lopsided;
  const auto tiles = call.machine.tiles;
  for (m.at_once = 1; m.at_once <= std::min(call.units, tiles); ++m.at_once) {
    m.waves = (call.units + m.at_once - 1) / m.at_once;
    for (m.rows = 1; m.rows * m.at_once <= tiles; ++m.rows)
      for (m.columns = 1; m.tiles_each() * m.at_once <= tiles; ++m.columns)
        for (m.query_chunks = 1; m.query_chunks <= most_chunks; ++m.query_chunks)
          for (m.key_chunks = m.columns; m.key_chunks <= most_chunks; ++m.key_chunks)
            for (m.in_flight = 1; m.in_flight <= (m.key_chunks + m.columns - 1) / m.columns; ++m.in_flight) {
              if (m.query_chunks * call.heads_each < m.rows) continue;
              const auto evaluation = simulator::evaluate(call, m);
              if (evaluation.fits(call) && (best == 0 || evaluation.cycles < best)) best = evaluation.cycles;
            }
  }
  return best;
}

class NearTheBest : public testing::TestWithParam<Case> {};

TEST_P(NearTheBest, WithinATenth) {
  const Planned planned(GetParam());
  const simulator::Call call(planned.problem, *planned.plan, planned.machine, {});
  const auto chosen = simulator::best(call);
  const auto best = best_of_all(call);
  ASSERT_GT(best, 0);
  EXPECT_LE(chosen.peak, call.memory());
  EXPECT_LE(chosen.cycles, 1.1 * best);
  RecordProperty("ratio", std::to_string(chosen.cycles / best));
}

// The last four need the descent from the best guess: without it they take 1.11 to 1.33 times as long as the best.
INSTANTIATE_TEST_SUITE_P(Planner, NearTheBest,
                         testing::Values(Case{"full", 4, 1 << 16, 1}, Case{"causal", 4, 1 << 16, 1},
                                         Case{"local", 4, 1 << 16, 1}, Case{"full", 6, 1 << 15, 2},
                                         Case{"causal", 6, 1 << 15, 2}, Case{"local", 6, 1 << 15, 2},
                                         Case{"full", 4, 1 << 17, 2, true}, Case{"causal", 4, 1 << 17, 2, true},
                                         Case{"local", 4, 1 << 17, 2, true}, Case{"causal", 11, 1 << 15, 1, false, 181},
                                         Case{"causal", 11, 1 << 14, 1, false, 140},
                                         Case{"causal", 8, 1 << 15, 1, true, 173},
                                         Case{"local", 7, 1 << 17, 2, true, 81}));

/// Every length up to 65,536 on an IPU, forward and backward: a plan that fits.
TEST(Fits, EveryLength) {
  use_tile_machine(tile_machine("ipu-mk2"));
  const auto memory = used_tile_machine().memory_per_tile;
  for (const bool backward : {false, true})
    for (const std::int64_t d : {64, 128})
      for (const auto& rule : {full(), causal(), local(256)})
        for (std::int64_t n = 512; n <= 65536; n *= 2) {
          const TensorView q(nullptr, ElementType::float16, {1, 4, n, d}, Device{DeviceKind::tiles});
          Options options;
          options.rule = rule;
          EXPECT_LE(predict_tiles(q, q, q, options, backward).peak_bytes, memory)
              << n << " tokens, d " << d << ", " << rule.text() << (backward ? ", backward" : "");
        }
}

/// Few tiles may send partial gradients of a key chunk at once, or they do not fit.
TEST(Fits, StaggeredBackward) {
  use_tile_machine(tile_machine("flatattention-32x32"));
  const TensorView q(nullptr, ElementType::float16, {1, 4, 65536, 64}, Device{DeviceKind::tiles});
  Options options;
  options.rule = causal();
  EXPECT_NO_THROW(predict_tiles(q, q, q, options, true));
}

/// The least budget does not depend on what the rule hides.
TEST(Fits, TheSameLeastBudget) {
  use_tile_machine(tile_machine("ipu-mk2"));
  const TensorView q(nullptr, ElementType::float16, {1, 4, 4096, 64}, Device{DeviceKind::tiles});
  for (const bool backward : {false, true})
    for (const bool deterministic : {false, true}) {
      Options options;
      options.deterministic = deterministic;
      const auto least = least_workspace(q, q, q, options, backward);
      for (const auto& rule : {causal(), local(256)}) {
        options.rule = rule;
        EXPECT_EQ(least_workspace(q, q, q, options, backward), least) << rule.text();
      }
    }
}

/// Causal calls are dealt as evenly as it takes to come near to those without a rule.
TEST(Utilisation, OfCausalCalls) {
  use_tile_machine(tile_machine("ipu-mk2"));
  const TensorView q(nullptr, ElementType::float16, {1, 4, 16384, 128}, Device{DeviceKind::tiles});
  Options options;
  const auto all = predict_tiles(q, q, q, options).utilisation;
  options.rule = causal();
  EXPECT_GE(predict_tiles(q, q, q, options).utilisation, 0.87 * all);
}

}  // namespace
}  // namespace anyflash
