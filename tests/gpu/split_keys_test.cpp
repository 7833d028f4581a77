// The parts that the keys of few tasks are dealt to: together they have every key block that a query sees, none is empty,
// and there are no more than multiprocessors. No GPU is needed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "../random.h"
#include "cuda/backend.h"
#include "cuda/portable/decode.h"
#include "plan/plan.h"
#include "stand_in_device.h"

namespace anyflash::cuda {
namespace {

constexpr Device gpu{DeviceKind::cuda};

TEST(SplitKeys, HaveEveryVisitedBlock) {
  std::mt19937 random(anyflash::testing::seed_of(1));
  const auto one_of = [&](auto... numbers) {
    const std::int64_t all[] = {numbers...};
    return all[random() % std::size(all)];
  };
  std::vector<std::uint8_t> seen(4 * 128);  // head h sees 32 (h + 1) blocks of 128 keys
  for (std::size_t i = 0; i < seen.size(); ++i) seen[i] = i % 128 < 32 * (i / 128 + 1);
  const TensorView bitmap(seen.data(), ElementType::boolean, {4, 1, 128});
  const Rule rules[] = {
      full(), causal(), local(3000) & causal(), local(100), sink(64) | local(50), blocks(bitmap, 1024, 128)};
  std::int64_t split = 0;
  for (int n = 0; n < 1000; ++n) {
    const auto d = one_of(64, 128, 256), queries = one_of(1, 40, 64, 100, 1000), keys = one_of(64, 1000, 5001, 16384);
    const auto batch = one_of(1, 2, 8), key_heads = one_of(1, 2, 4), heads = key_heads * one_of(1, 2, 4);
    const TensorView q(nullptr, ElementType::bfloat16, {batch, heads, queries, d}, gpu);
    const TensorView k(nullptr, ElementType::bfloat16, {batch, key_heads, keys, d}, gpu);
    Options options;
    const auto rule = random() % std::size(rules);
    if (rule + 1 == std::size(rules) && (heads != 4 || keys != 16384)) continue;
    options.rule = rules[rule];
    options.align = Align::none_end;
    options.deterministic = random() % 4 == 0;
    if (random() % 4 == 0) options.memory_budget = one_of(1 << 16, 1 << 22, 1 << 30);
    std::int32_t lengths[8];  // not read
    const bool has_lengths = rule + 1 < std::size(rules) && random() % 4 == 0;
    if (has_lengths) options.key_lengths = TensorView(lengths, ElementType::int32, {batch}, gpu);
    const auto problem = shape_problem(q, k, k, options, Direction::forward);
    const auto plan = make_plan(problem, tile_menu(problem));
    const auto tasks = one_of(1, 5, 16, 60, 67, 1000), step_keys = one_of(64, 128);
    const auto parts = key_parts(problem, *plan, step_keys, tasks);
    const auto beside = key_parts(problem, *plan, step_keys, tasks, true);  // the same parts, or none
    EXPECT_TRUE(beside.count == 1 || (beside.count == parts.count && beside.blocks == parts.blocks));
    if (parts.count == 1) {
      EXPECT_EQ(parts.first, 0);
      EXPECT_GE(parts.blocks, plan->key_grid.count());
      EXPECT_EQ(part_bytes(problem, parts), 0);
      continue;
    }
    ++split;
    EXPECT_FALSE(options.deterministic);
    if (options.memory_budget) {
      EXPECT_LE(part_bytes(problem, parts), *options.memory_budget);
    }
    EXPECT_LE(tasks * parts.count, 132);
    EXPECT_EQ(parts.blocks % (step_keys / 64), 0);
    EXPECT_GE(part_bytes(problem, parts), parts.count * batch * heads * queries * (d + 3) * 4);
    std::int64_t first = plan->key_grid.count(), end = 0;
    for (const auto& group : plan->groups)
      for (const auto& run : group.keys_of_query_block.runs)
        first = std::min<std::int64_t>(first, run.first), end = std::max<std::int64_t>(end, run.first + run.count);
    if (has_lengths) first = 0, end = plan->key_grid.count();  // they may move a rule's window anywhere
    EXPECT_LE(parts.first, first);
    EXPECT_GE(parts.first + parts.count * parts.blocks, end);
    EXPECT_LT(parts.first + (parts.count - 1) * parts.blocks, end);
  }
  EXPECT_GT(split, 100);
}

/// As measured at 64 channels beside tasks of one query block (docs/notes/gpu-decode.md).
TEST(SplitKeys, SaveMoreThanTasksOfOneQueryBlock) {
  const auto count = [](std::int64_t heads, std::int64_t queries, std::int64_t keys, bool few_visits) {
    const TensorView q(nullptr, ElementType::bfloat16, {1, heads, queries, 64}, gpu);
    const TensorView k(nullptr, ElementType::bfloat16, {1, heads, keys, 64}, gpu);
    const auto problem = shape_problem(q, k, k, Options(), Direction::forward);
    return key_parts(problem, *make_plan(problem, tile_menu(problem)), 128, heads * ((queries + 191) / 192), few_visits)
        .count;
  };
  EXPECT_EQ(count(16, 100, 4000, true), 8);
  EXPECT_EQ(count(32, 200, 6000, true), 2);
  EXPECT_EQ(count(32, 200, 2048, true), 1);
  EXPECT_EQ(count(32, 200, 2048, false), 2);
}

}  // namespace
}  // namespace anyflash::cuda
