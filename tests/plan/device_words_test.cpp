// What tables of words a GPU is given; no GPU is needed.
#include "cuda/common/device_plan.h"
#include "helpers.h"
#include "plan/cache.h"

namespace anyflash::planning {
namespace {

TEST(DeviceWords, APlanTooLargeToBeRememberedSharesThem) {
  const auto problem =
      problem_of({local(8), 2, {{1, 8192, 4096}}, {{1, 8192, 4096}}, Align::none_front, Direction::backward});
  const auto plan = make_plan(problem, test_menu());
  EXPECT_GT(bytes_of(*plan), PlanCache::most_bytes);
  EXPECT_FALSE(plan->kept);
  EXPECT_EQ(cuda::word_workspace(problem, *plan, false), 0) << "one table for each difference of tiles";
  EXPECT_GT(cuda::device_bytes(problem, *plan), 0u) << "comes with each call";
}

}  // namespace
}  // namespace anyflash::planning
