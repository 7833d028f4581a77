// The boxes chosen: how much is visited for what is visible, and that nothing but rule, sizes and menu has a say.
#include "plan/boxes.h"

#include "cpu/backend.h"
#include "helpers.h"

namespace anyflash::planning {
namespace {

/// Visited pairs over visible ones; menus: the tests' own, and the CPU's.
void expect_ratio(const Case& c, double visible, double most) {
  const auto problem = problem_of(c);
  for (const auto& menu : {test_menu(), cpu::tile_menu(problem)}) {
    const auto plan = make_plan(problem, menu);
    const auto ratio = double(visited_pairs(*plan)) / visible;
    EXPECT_LE(ratio, most) << c.rule.text();
    EXPECT_GE(ratio, 1) << c.rule.text();
  }
}

/// Pairs with |x - y| < window, of n entries.
double band(double n, double window) { return n * n - (n - window) * (n - window + 1); }

TEST(Boxes, VisitLittleMoreThanIsVisible) {
  const Int3 image{{1, 512, 512}}, line{{1, 1, 16384}};
  expect_ratio({local(8), 2, image, image}, band(512, 8) * band(512, 8), 4);
  expect_ratio({local(16), 2, image, image}, band(512, 16) * band(512, 16), 2.6);
  expect_ratio({local(64, 2), 1, line, line}, 4 * band(4096, 64), 2.5);
  expect_ratio({causal(), 1, line, line}, 16384.0 * 16385 / 2, 1.1);
}

TEST(Boxes, StepWithDilation) {
  const Int3 image{{1, 256, 256}};
  // Inside each residue class 64 entries a side, each sees 7.
  expect_ratio({neighbourhood(7, 4), 2, image, image}, 256.0 * 256 * 49, 12);
  // Queries sit at every 4th key's coordinate: a query's keys are 8 apart, its neighbours' every 2nd query.
  const Case scaled{local(64, 3), 1, {{1, 1, 4096}}, {{1, 1, 16384}}, Align::scale_front};
  const auto plan = make_plan(problem_of(scaled), test_menu());
  EXPECT_EQ(plan->query_grid.step[2], 2);
  EXPECT_EQ(plan->key_grid.step[2], 8);
}

TEST(Boxes, AreRunsWhereTheOrderCounts) {
  const Int3 line{{1, 1, 4096}}, one{{1, 1, 1}};
  for (const auto& rule : {full(), causal(), local(256), prefix(100)}) {
    const auto plan = make_plan(problem_of({rule, 1, line, line}), test_menu());
    EXPECT_EQ(plan->key_grid.extent, (Int3{{1, 1, 64}})) << rule.text();
    EXPECT_EQ(plan->key_grid.step, one) << rule.text();
  }
  EXPECT_EQ(make_plan(problem_of({full(), 1, line, line}), test_menu())->query_grid.extent, (Int3{{1, 1, 256}}));
}

TEST(Boxes, WasteLittleOnShortRows) {
  const Int3 image{{1, 20, 20}};
  const auto plan = make_plan(problem_of({full(), 2, image, image}), test_menu());
  EXPECT_EQ(plan->key_grid.extent, (Int3{{1, 8, 8}}));
  EXPECT_LE(visited_pairs(*plan), 24 * 24 * 32 * 32);
}

TEST(Boxes, SuitVideo) {
  const Int3 video{{32, 32, 32}};
  const double visible = band(32, 4) * band(32, 4) * band(32, 4);
  expect_ratio({local(4), 3, video, video}, visible, 9);
}

TEST(Boxes, OfASingleQueryAreSmall) {
  const auto plan = make_plan(problem_1d(full(), 1, 5000), test_menu());
  EXPECT_EQ(plan->query_grid.count(), 1);
  EXPECT_EQ(rules::volume(plan->query_grid.extent), 64);
}

TEST(Boxes, DoNotDependOnTheBatch) {
  const std::int64_t n = 600;
  std::vector<std::int32_t> ids(3 * n);
  for (std::int64_t i = 0; i < n; ++i) {
    ids[n + i] = std::int32_t(i / 20);
    ids[2 * n + i] = std::int32_t(i / 300);
  }
  const auto grids = [&](std::int64_t first, std::int64_t batch, const Rule& also) {
    const TensorView view(ids.data() + first * n, ElementType::int32, {batch, n});
    auto problem = problem_1d(documents(view, view) & also, n, n);
    problem.batch = batch;
    const auto plan = make_plan(problem, test_menu());
    return std::pair(plan->query_grid.extent, plan->query_grid.step);
  };
  for (const auto& also : {full(), causal(), local(9, 3)}) {
    const auto all = grids(0, 3, also);
    for (int b = 0; b < 3; ++b) EXPECT_EQ(grids(b, 1, also), all) << also.text();
  }
}

}  // namespace
}  // namespace anyflash::planning
