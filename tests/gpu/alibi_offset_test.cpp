// Where Hopper's kernels take ALiBi's distance from the numbers of a tile's rows, it is that of the pair's coordinates. No
// GPU is needed.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "../random.h"
#include "cuda/backend.h"
#include "cuda/portable/launch.h"
#include "plan/plan.h"
#include "rules/coordinates.h"
#include "stand_in_device.h"

namespace anyflash::cuda {
namespace {

constexpr Device gpu{DeviceKind::cuda};

/// The entry of a row of a one-dimensional grid's block.
std::int32_t entry(const rules::Grid& grid, std::int32_t block, std::int32_t row) {
  const auto box = grid.box(block);
  return box.origin[2] + row * box.step[2];
}

TEST(AlibiOffset, GivesEveryPairSDistance) {
  std::mt19937 random(anyflash::testing::seed_of(1));
  const auto one_of = [&](auto... numbers) {
    const std::int64_t all[] = {numbers...};
    return all[random() % std::size(all)];
  };
  std::vector<std::int32_t> ids(1000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i / 300);
  const TensorView of_ids(ids.data(), ElementType::int32, {static_cast<std::int64_t>(ids.size())});
  const Rule rules[] = {full(),       causal(),         local(20),   local(64, 2),
                        local(30, 3), window({9}, {0}), prefix(100), documents(of_ids, of_ids)};
  std::int64_t linear = 0;
  for (int n = 0; n < 2000; ++n) {
    const auto d = one_of(64, 128, 256), queries = one_of(64, 333, 1000, 1000), keys = one_of(64, 777, 1000, 1000);
    const TensorView q(nullptr, ElementType::bfloat16, {2, 4, queries, d}, gpu);
    const TensorView k(nullptr, ElementType::bfloat16, {2, 2, keys, d}, gpu);
    Options options;
    const auto rule = random() % std::size(rules);
    const bool of_documents = rule + 1 == std::size(rules);
    if (of_documents && (queries != 1000 || keys != 1000)) continue;
    options.rule = rules[rule];
    const Align aligns[] = {Align::none_front, Align::none_end, Align::scale_front, Align::scale_end};
    options.align = aligns[random() % 4];
    float slopes[4];  // not read
    options.alibi_slopes = TensorView(slopes, ElementType::float32, {4}, gpu);
    for (const auto direction : {Direction::forward, Direction::backward}) {
      const auto problem = shape_problem(q, k, k, options, direction);
      const auto plan = make_plan(problem, tile_menu(problem));
      if (!alibi_is_linear(problem, *plan)) {
        const bool simple = (rule < 2 || rule == 6) && (options.align == Align::none_front || queries == keys);
        EXPECT_FALSE(simple) << queries << " x " << keys << ", rule " << rule;
        continue;
      }
      ++linear;
      EXPECT_FALSE(of_documents);
      const auto& program = plan->groups[0].program;
      for (int pair = 0; pair < 50; ++pair) {
        const auto i = static_cast<std::int32_t>(random() % queries), j = static_cast<std::int32_t>(random() % keys);
        const auto x = entry(plan->query_grid, i / 64, i % 64), y = entry(plan->key_grid, j / 64, j % 64);
        if (x >= queries || y >= keys) continue;
        ASSERT_EQ(rules::query_coordinate(program, {{0, 0, x}})[2] - rules::key_coordinate(program, {{0, 0, y}})[2],
                  i - j + alibi_offset(*plan))
            << queries << " x " << keys << ", rule " << rule << ", alignment " << static_cast<int>(options.align);
      }
    }
  }
  EXPECT_GT(linear, 500);
}

}  // namespace
}  // namespace anyflash::cuda
