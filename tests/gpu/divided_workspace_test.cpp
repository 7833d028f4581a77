// The workspace of a divided call on a GPU is that of the part which needs most. No GPU is needed: what the run-time
// library says of one is said here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>

#include "../random.h"
#include "cuda/backend.h"
#include "plan/parts.h"
#include "plan/plan.h"
#include "stand_in_device.h"

namespace anyflash::cuda {
namespace {

constexpr Device gpu{DeviceKind::cuda};

/// How much more memory a part needs than the call says, of a call in parts of `groups`.
std::int64_t lacks(Problem problem, std::int64_t groups) {
  const auto plan = make_plan(problem, tile_menu(problem));
  problem.chunks.groups = groups, problem.chunks.portable = problem.deterministic;
  std::int64_t most = 0;
  planning::for_each_part(problem, *plan, [&](Problem part, const ExecutionPlan& of_part) {
    part.chunks.groups = 0;
    most = std::max(most, workspace(part, of_part));
  });
  return most - workspace(problem, *plan);
}

TEST(DividedWorkspace, IsThatOfThePartThatNeedsMost) {
  std::mt19937 random(anyflash::testing::seed_of(1));
  const auto one_of = [&](auto... numbers) {
    const std::int64_t all[] = {numbers...};
    return all[random() % std::size(all)];
  };
  for (int n = 0; n < 5000; ++n) {
    const auto batch = one_of(1, 2, 3, 17, 65, 129), heads = one_of(1, 2, 8), d = one_of(8, 64, 128, 256);
    const auto queries = one_of(1, 5, 64, 1000, 4160, 8192), keys = one_of(64, 1000, 32768, 65536);
    const auto type = random() % 4 == 0 ? ElementType::float32 : ElementType::bfloat16;
    const TensorView q(nullptr, type, {batch, heads * one_of(1, 4), queries, d}, gpu);
    const TensorView k(nullptr, type, {batch, heads, keys, d}, gpu);
    Options options;
    options.deterministic = random() % 2;
    int lengths = 0;  // not read
    const bool on_gpu = random() % 2;
    if (on_gpu) options.key_lengths = TensorView(&lengths, ElementType::int32, {batch}, gpu);
    for (const auto direction : {Direction::forward, Direction::backward}) {
      const auto groups = 1 + static_cast<std::int64_t>(random() % (batch * heads));
      EXPECT_EQ(lacks(shape_problem(q, k, k, options, direction), groups), 0)
          << batch << " entries, " << heads << " key heads of " << d << ", " << queries << " x " << keys
          << (on_gpu ? ", lengths on the GPU, " : ", ") << groups << " at once";
    }
  }
}

}  // namespace
}  // namespace anyflash::cuda
