// The choice of chunks: what candidates need, which one is taken, and that calls keep to it.
#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "backends.h"
#include "helpers.h"
#include "plan/chunks.h"
#include "plan/cost.h"

namespace anyflash::planning {
namespace {

/// Shapes alone, as explain and plan see a call.
Problem problem_for(const Rule& rule, std::int64_t length, Direction direction, Options options = {}) {
  const TensorView x(nullptr, ElementType::float32, {1, 4, length, 64});
  options.rule = rule;
  options.threads = 2;
  return shape_problem(x, x, x, options, direction);
}

std::shared_ptr<const ExecutionPlan> plan_for(const Problem& problem) {
  return make_plan(problem, backend_of(problem.device).menu(problem));
}

const Rule rules_to_try[] = {full(), causal(), causal() & local(128), ~causal()};
constexpr Direction both[] = {Direction::forward, Direction::backward};

TEST(Chunks, CandidatesNeedWhatTheBackendSays) {
  for (const auto& rule : rules_to_try)
    for (const auto direction : both) {
      auto problem = problem_for(rule, 1500, direction);
      const auto plan = plan_for(problem);
      problem.memory_budget = 1 << 20;
      const auto candidates = candidates_of(problem, *plan);
      ASSERT_GT(candidates.size(), 3u);
      for (const auto& [chunks, shown] : candidates) {
        auto divided = problem;
        divided.chunks = chunks;
        EXPECT_EQ(shown.bytes, backend_of(problem.device).workspace(divided, *plan));
        EXPECT_EQ(shown.fits, shown.bytes <= 1 << 20);
        EXPECT_GT(shown.cost.compute, 0);
      }
    }
}

/// On a GPU: fewer groups at once as long as those of the fast kernels fit, then as many of the portable ones as fit.
TEST(Chunks, OfAGpu) {
  constexpr std::int64_t groups = 8, fast = 100, portable = 10;
  Backend backend{};
  backend.workspace = [](const Problem& problem, const ExecutionPlan&) {
    const auto at_once = problem.chunks.groups > 0 ? problem.chunks.groups : groups;
    return at_once * (problem.chunks.portable ? portable : fast);
  };
  const TensorView x(nullptr, ElementType::float32, {2, 4, 64, 64});
  auto problem = shape_problem(x, x, x, {});
  const auto plan = plan_for(problem);
  problem.device.kind = DeviceKind::cuda;
  const auto chosen = [&](std::int64_t budget) -> std::optional<Chunks> {
    problem.memory_budget = budget;
    for (const auto& one : candidates_on(backend, problem, *plan))
      if (one.shown.chosen) return one.chunks;
    return {};
  };
  EXPECT_EQ(chosen(800), Chunks());
  EXPECT_EQ(chosen(799), Chunks{.groups = 4});
  EXPECT_EQ(chosen(399), Chunks{.groups = 2});
  EXPECT_EQ(chosen(100), Chunks{.groups = 1});
  EXPECT_EQ(chosen(99), Chunks{.portable = true});
  EXPECT_EQ(chosen(79), (Chunks{.groups = 4, .portable = true}));
  EXPECT_EQ(chosen(10), (Chunks{.groups = 1, .portable = true}));
  EXPECT_FALSE(chosen(9));
  problem.memory_budget = 800;
  EXPECT_EQ(chosen_on(backend, problem, *plan), Chunks());
  problem.deterministic = true;  // the kernel must not depend on what else is in the batch
  for (const std::int64_t budget : {800, 80}) {
    EXPECT_EQ(chosen(budget), Chunks{.portable = true});
    EXPECT_EQ(chosen_on(backend, problem, *plan), Chunks{.portable = true}) << budget;
  }
  EXPECT_EQ(chosen(79), (Chunks{.groups = 4, .portable = true}));
  EXPECT_EQ(chosen_on(backend, problem, *plan), (Chunks{.groups = 4, .portable = true}));
  problem.memory_budget.reset();
  EXPECT_FALSE(candidates_on(backend, problem, *plan).front().chunks.portable);
  EXPECT_EQ(chosen_on(backend, problem, *plan), Chunks());
  problem.deterministic = false, problem.memory_budget = 9;

  PlanExplanation explanation;
  for (const auto& one : candidates_on(backend, problem, *plan)) {
    EXPECT_FALSE(one.shown.timed);
    EXPECT_EQ(one.shown.portable, one.chunks.portable);
    if (one.chunks.portable) explanation.candidates = {one.shown};
  }
  const auto table = plan_text(explanation), picture = plan_svg(explanation, "");
  EXPECT_NE(table.find("  portable"), std::string::npos) << table;
  EXPECT_NE(picture.find("portable, "), std::string::npos) << picture;
  for (const auto* const second : {" s", " ms", " us"}) EXPECT_EQ(table.find(second), std::string::npos) << table;
  EXPECT_EQ(picture.find("compute"), std::string::npos) << picture;

  // A build, or a type, that has no other kernels than the portable ones.
  backend.workspace = [](const Problem& given, const ExecutionPlan&) {
    return given.chunks.groups > 0 ? given.chunks.groups : groups;
  };
  for (const auto& one : candidates_on(backend, problem, *plan)) EXPECT_FALSE(one.shown.portable);
  EXPECT_EQ(chosen(1), Chunks{.groups = 1});
}

TEST(Chunks, LeastBudgetWorksAndOneByteLessDoesNot) {
  for (const auto& rule : rules_to_try)
    for (const auto direction : both) {
      auto problem = problem_for(rule, 1500, direction);
      const auto plan = plan_for(problem);
      const auto least = least_bytes(problem, *plan);
      problem.memory_budget = least;
      problem.chunks = chosen_chunks(problem, *plan);
      EXPECT_EQ(backend_of(problem.device).workspace(problem, *plan), least);
      problem.chunks = {};
      problem.memory_budget = least - 1;
      const auto line =
          "memory_budget: " + std::to_string(least - 1) + " bytes, expected at least " + std::to_string(least);
      try {
        chosen_chunks(problem, *plan);
        FAIL() << "a budget below the least";
      } catch (const Error& error) {
        EXPECT_EQ(error.what(), line);
      }
    }
}

TEST(Chunks, ChosenIsTheFastestThatFits) {
  for (const auto& rule : rules_to_try)
    for (const auto direction : both) {
      auto problem = problem_for(rule, 3000, direction);
      const auto plan = plan_for(problem);
      const auto whole = backend_of(problem.device).workspace(problem, *plan), least = least_bytes(problem, *plan);
      for (int step = 0; step < 8; ++step) {
        const auto budget = least + (whole - least) * step / 8;
        problem.memory_budget = budget;
        double fastest = HUGE_VAL;
        const PlanCandidate* chosen = nullptr;
        const auto candidates = candidates_of(problem, *plan);
        for (const auto& [chunks, shown] : candidates) {
          if (shown.bytes <= budget) fastest = std::min(fastest, shown.cost.total());
          if (!shown.chosen) continue;
          EXPECT_EQ(chosen, nullptr) << "two are chosen";
          chosen = &shown;
          EXPECT_TRUE(chosen_chunks(problem, *plan) == chunks);
        }
        ASSERT_NE(chosen, nullptr);
        EXPECT_LE(chosen->bytes, budget);
        EXPECT_LE(chosen->cost.total(), 1.03 * fastest);
      }
      problem.memory_budget = whole;
      EXPECT_FALSE(chosen_chunks(problem, *plan).any()) << "what fits undivided is not divided";
    }
}

TEST(Chunks, CountsAreKept) {
  for (const auto direction : both) {
    Options options;
    options.num_chunks_q = 5, options.num_chunks_kv = 3;
    auto problem = problem_for(causal(), 1500, direction, options);
    const auto plan = plan_for(problem);
    for (const auto& one : candidates_of(problem, *plan)) {
      EXPECT_EQ(one.chunks.q, 5);
      EXPECT_EQ(one.chunks.kv, 3);
    }
  }
}

TEST(Cost, CountsTheTilesOfAPlan) {
  const auto problem = problem_for(causal(), 64 * 32, Direction::backward);
  const auto plan = plan_for(problem);
  const auto work = work_of(*plan);
  ASSERT_EQ(rules::volume(plan->query_grid.extent), 64);
  EXPECT_EQ(work.full, 32 * 31 / 2);
  EXPECT_EQ(work.partial_tiles, 32);
  EXPECT_GT(work.partial, 16);
  EXPECT_LT(work.partial, 32);
  EXPECT_EQ(work.key_loads, 32 * 33 / 2);
}

TEST(Cost, GrowsWithTilesAndChunksAndFallsWithThreads) {
  const auto seconds = [](const Rule& rule, std::int64_t length, Direction direction, const Chunks& chunks) {
    auto problem = problem_for(rule, length, direction);
    const auto plan = plan_for(problem);
    problem.chunks = chunks;
    Calibration machine = calibration();
    machine.parallel = 1.9, machine.threads = 2;
    return cost_of(problem, *plan, work_of(*plan), machine).total();
  };
  for (const auto direction : both) {
    const auto whole = seconds(causal(), 4096, direction, {});
    EXPECT_NEAR(seconds(full(), 4096, direction, {}) / whole, 2, 0.2);
    EXPECT_NEAR(seconds(causal(), 8192, direction, {}) / whole, 4, 0.4);
    EXPECT_NEAR(seconds(causal(), 4096, direction, {0, 0, 0, 0, 1}) / whole, 1.9, 0.1);
    EXPECT_GT(seconds(causal(), 4096, direction, {1, 4, 4, 0, 2}), whole);
  }
  const auto one_pass = seconds(full(), 4096, Direction::backward, {1, 4, 1, 0, 2});
  EXPECT_NEAR(seconds(full(), 4096, Direction::backward, {1, 4, 2, 0, 2}) / one_pass, 7.0 / 5, 0.1);
}

}  // namespace
}  // namespace anyflash::planning
