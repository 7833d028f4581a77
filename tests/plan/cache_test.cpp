#include "plan/cache.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <future>
#include <thread>
#include <tuple>

#include "helpers.h"

namespace anyflash::planning {
namespace {

TEST(Cache, GivesTheSamePlanForTheSameCall) {
  const auto problem = problem_1d(causal() & local(33), 777, 778);
  const auto first = make_plan(problem, test_menu());
  EXPECT_EQ(make_plan(problem, test_menu()), first);
  EXPECT_EQ(make_plan(problem_1d(causal() & local(33), 777, 778), test_menu()), first) << "an equal rule, built anew";
  auto other_data = problem;
  char memory[8];
  other_data.q.data = memory;
  other_data.batch = 9;
  EXPECT_EQ(make_plan(other_data, test_menu()), first) << "neither data nor batch change a plan";
}

TEST(Cache, OneBlockThatSeesAllHasThePlanThatIsKept) {
  for (const auto align : {Align::none_front, Align::none_end, Align::scale_end}) {
    for (const auto queries : {1, 2, 63, 64}) {
      for (const auto keys : {1, 63, 64, 65, 128, 129, 1000}) {
        auto problem = problem_1d(full(), queries, keys);
        problem.align = align;
        const auto made = make_plan(problem, test_menu()), kept = make_plan(problem, test_menu(), true);
        EXPECT_NE(made, kept);
        for (const auto& [own, other] :
             {std::pair(made->query_grid, kept->query_grid), std::pair(made->key_grid, kept->key_grid)}) {
          EXPECT_EQ(own.size, other.size);
          EXPECT_EQ(own.extent, other.extent);
          EXPECT_EQ(own.step, other.step);
        }
        EXPECT_EQ(made->threads, kept->threads);
        ASSERT_EQ(made->groups.size(), 1u);
        const auto &own = made->groups[0], &other = kept->groups[0];
        EXPECT_EQ(own.program.dimensions, other.program.dimensions);
        EXPECT_EQ(own.program.atom_count, other.program.atom_count);
        EXPECT_TRUE(own.program.conjunction && other.program.conjunction);
        EXPECT_EQ(std::memcmp(&own.program.axis[2], &other.program.axis[2], sizeof(rules::Axis)), 0);
        EXPECT_EQ(own.keys_of_query_block.start, other.keys_of_query_block.start);
        ASSERT_EQ(own.keys_of_query_block.runs.size(), other.keys_of_query_block.runs.size());
        for (std::size_t i = 0; i < own.keys_of_query_block.runs.size(); ++i) {
          const auto &run = own.keys_of_query_block.runs[i], &expected = other.keys_of_query_block.runs[i];
          EXPECT_EQ(std::tie(run.first, run.count, run.kind), std::tie(expected.first, expected.count, expected.kind));
        }
      }
    }
  }
}

TEST(Cache, TellsApartWhatDiffers) {
  const auto problem = problem_1d(causal(), 777, 779);
  std::vector<std::shared_ptr<const ExecutionPlan>> plans;
  const auto add = [&](const Problem& p, const TileMenu& menu) { plans.push_back(make_plan(p, menu)); };
  add(problem, test_menu());
  auto other = problem;
  other.align = Align::none_end;
  add(other, test_menu());
  other = problem;
  other.direction = Direction::backward;
  add(other, test_menu());
  other = problem;
  other.q_size[2] = 776;
  add(other, test_menu());
  other = problem;
  other.k_size[2] = 778;
  add(other, test_menu());
  other = problem;
  other.rule = ~causal();
  add(other, test_menu());
  other = problem;
  other.threads = 3;
  add(other, test_menu());
  other = problem;
  other.batch = 0, other.tables_on_device = true;  // lengths of no entry, on a GPU
  add(other, test_menu());
  auto menu = test_menu();
  menu.query_rows = {64};
  add(problem, menu);
  menu = test_menu();
  menu.tile_cost = 1;
  add(problem, menu);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(plans[i], plans[j]) << i << " " << j;
  }
}

TensorView view_of(std::vector<std::int32_t>& ids) {
  return {ids.data(), ElementType::int32, {std::int64_t(ids.size())}};
}

TEST(Cache, KeepsThePlanOfDocumentsThatComeTwice) {
  std::vector<std::int32_t> ids(300), others(300);
  for (int i = 0; i < 300; ++i) ids[i] = i / 70, others[i] = i / 71;
  const auto plan = [&](std::vector<std::int32_t>& of) {
    return make_plan(problem_1d(documents(view_of(of), view_of(of)) & causal(), 300, 300), test_menu());
  };
  const auto first = plan(ids), second = plan(ids), third = plan(ids);
  EXPECT_FALSE(first->kept) << "they may never come again";
  EXPECT_NE(first, second);
  EXPECT_TRUE(second->kept);
  EXPECT_EQ(second, third);
  EXPECT_NE(plan(others), second);
  auto copy = ids;
  EXPECT_EQ(plan(copy), second) << "the same documents elsewhere in memory";
  copy[299] = 9;
  EXPECT_NE(plan(copy), second) << "what they hold counts, not where they are";
  EXPECT_EQ(plan(ids), second);
  auto keys = ids;
  keys[0] = 3;
  const auto mixed = [&] {
    return make_plan(problem_1d(documents(view_of(ids), view_of(keys)) & causal(), 300, 300), test_menu());
  };
  mixed();
  EXPECT_NE(mixed(), second) << "those of the keys count too";
}

TEST(Cache, TellsDocumentsOfBatchEntriesApart) {
  std::vector<std::int32_t> ids(600);
  for (int i = 0; i < 600; ++i) ids[i] = i / 50;
  const auto plan = [&](std::int64_t batch) {
    auto problem = problem_1d(documents({ids.data(), ElementType::int32, {batch, 600 / batch}},
                                        {ids.data(), ElementType::int32, {batch, 600 / batch}}),
                              std::int32_t(600 / batch), std::int32_t(600 / batch));
    problem.batch = batch;
    make_plan(problem, test_menu());
    return make_plan(problem, test_menu());
  };
  EXPECT_EQ(plan(2)->batch_groups, 2);
  EXPECT_EQ(plan(1)->batch_groups, 1);
  EXPECT_EQ(plan(3)->batch_groups, 3);
}

TEST(Cache, TellsDocumentsOfNoHeadsApart) {
  std::vector<std::int32_t> ids(300, 1);
  const auto plan = [&](std::int64_t heads) {
    auto problem = problem_1d(documents(view_of(ids), view_of(ids)), 300, 300);
    problem.heads_q = problem.heads_kv = heads;
    make_plan(problem, test_menu());
    return make_plan(problem, test_menu());
  };
  EXPECT_EQ(plan(0)->groups.size(), 0u);
  EXPECT_EQ(plan(2)->groups.size(), 1u);
  EXPECT_EQ(plan(0)->groups.size(), 0u);
  EXPECT_EQ(plan(1), plan(2));
}

TEST(Cache, LeavesBitmapsWhereTheyAre) {
  std::vector<std::uint8_t> bitmap(25, 1);
  const auto plan = [&] {
    const TensorView view{bitmap.data(), ElementType::uint8, {5, 5}};
    return make_plan(problem_1d(blocks(view, 64, 64), 300, 300), test_menu());
  };
  plan();
  const auto second = plan();
  EXPECT_FALSE(second->kept);
  EXPECT_NE(plan(), second);
}

TEST(Cache, ForgetsTheLeastRecentlyUsed) {
  const auto kept = make_plan(problem_1d(local(5), 300, 300), test_menu());
  const auto forgotten = make_plan(problem_1d(local(6), 300, 300), test_menu());
  for (std::int32_t n = 1; n <= std::int32_t(PlanCache::most_plans); ++n) {
    make_plan(problem_1d(local(7), n, n), test_menu());
    make_plan(problem_1d(local(5), 300, 300), test_menu());
  }
  EXPECT_EQ(plan_cache().plans(), PlanCache::most_plans);
  EXPECT_EQ(make_plan(problem_1d(local(5), 300, 300), test_menu()), kept);
  EXPECT_NE(make_plan(problem_1d(local(6), 300, 300), test_menu()), forgotten);
}

TEST(Cache, IsBoundedInBytes) {
  PlanCache cache;
  const auto plan_of = [](std::size_t bytes) {
    auto plan = std::make_shared<ExecutionPlan>();
    plan->groups.resize(1);
    plan->groups[0].keys_of_query_block.start.resize(bytes / sizeof(std::int64_t));
    return plan;
  };
  const auto third = PlanCache::most_bytes / 3;
  for (const char* key : {"a", "b", "c", "d"}) cache.insert(key, plan_of(third));
  EXPECT_EQ(cache.plans(), 2u);
  EXPECT_EQ(cache.find("b"), nullptr);
  EXPECT_NE(cache.find("d"), nullptr);
  const auto large = plan_of(PlanCache::most_bytes + 1);
  large->kept = true;
  EXPECT_EQ(cache.insert("e", large, true), large);
  EXPECT_TRUE(large->kept) << "by the caller";
  EXPECT_EQ(cache.insert("e", large), large);
  EXPECT_FALSE(large->kept);
  EXPECT_EQ(cache.find("e"), nullptr) << "larger than all of the cache";
  EXPECT_EQ(cache.plans(), 2u);
}

TEST(Cache, LetsPlansGoWithoutItsLock) {
  PlanCache cache;
  bool gone = false;
  {
    const auto plan = std::make_shared<ExecutionPlan>();
    plan->companions.of(0, [&] {  // as a GPU's, which may wait for the GPU; here it would wait for ever
      return std::shared_ptr<void>(&cache, [&](void*) { gone = cache.plans() > 0; });
    });
    cache.insert("first", plan);
  }
  for (std::size_t n = 0; n < PlanCache::most_plans; ++n)
    cache.insert(std::to_string(n), std::make_shared<ExecutionPlan>());
  EXPECT_TRUE(gone);
}

TEST(Cache, ServesManyThreads) {
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<const ExecutionPlan>> plans(8 * 50);
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([t, &plans] {
      for (int i = 0; i < 50; ++i) {
        auto problem = problem_1d(local(11), 1000 + i % 5, 900);
        problem.threads = 1;
        plans[t * 50 + i] = make_plan(problem, test_menu());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int i = 0; i < 8 * 50; ++i) {
    ASSERT_EQ(plans[i]->query_grid.size[2], 1000 + i % 50 % 5);
    EXPECT_EQ(plans[i], plans[i % 5]);
  }
}

TEST(Cache, LeavesTablesAlone) {
  std::vector<std::int32_t> ids(200, 1);
  const TensorView view(ids.data(), ElementType::int32, {200});
  const auto problem = problem_1d(documents(view, view), 200, 200);
  const auto one = make_plan(problem, test_menu());
  for (int i = 0; i < 100; ++i) ids[i] = 0;  // the same memory, other documents
  const auto two = make_plan(problem, test_menu());
  EXPECT_TRUE(rules::sees(one->groups[0].program, {{0, 0, 0}}, {{0, 0, 150}}));
  EXPECT_FALSE(rules::sees(two->groups[0].program, {{0, 0, 0}}, {{0, 0, 150}}));
}

TEST(Cache, IsFreeInTheChildOfAForkWhileAnotherThreadHoldsIt) {
  std::promise<void> held;
  std::thread holder([&] {
    plan_cache().lock();
    held.set_value();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    plan_cache().unlock();
  });
  held.get_future().wait();
  const auto child = fork();
  if (child == 0) {
    alarm(10);  // seconds
    plan_cache().plans();
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  holder.join();
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace anyflash::planning
