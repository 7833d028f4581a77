// A call in parts gives the bits of the whole one: pointers, masks and sizes of every operand are those of the part.
#include "plan/parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "../random.h"
#include "backends.h"

namespace anyflash::planning {
namespace {

constexpr std::int64_t batch = 3, heads = 4, heads_kv = 2, queries = 130, keys = 100, d = 16;

/// Tensors with all that a call may have, batch entries and heads apart in memory.
struct Call {
  std::mt19937 random{anyflash::testing::seed_of(1)};
  std::vector<std::vector<float>> memory;
  std::vector<std::int32_t> lengths{100, 37, 64};
  std::vector<std::uint8_t> bits = std::vector<std::uint8_t>(batch * heads * 3 * 2);
  Options options;
  TensorView q, k, v, dout, dlse, out, lse, row_sum, row_max;
  Gradients gradients;

  Call(bool batch_bias, bool head_bias, bool sink, bool masks) {
    q = numbers({batch, heads, queries, d}), dout = numbers({batch, heads, queries, d});
    k = numbers({batch, heads_kv, keys, d}), v = numbers({batch, heads_kv, keys, d});
    dlse = numbers({batch, heads, queries});
    const auto bias = std::initializer_list<std::int64_t>{batch_bias ? batch : 1, head_bias ? heads : 1, queries, keys};
    options.bias = numbers(bias), options.alibi_slopes = numbers({batch, heads});
    if (sink) options.sink = numbers({heads}), gradients.dsink = results({heads});
    options.threads = 2;
    options.rule = causal();
    if (masks) {
      for (auto& bit : bits) bit = random() % 3 > 0;
      options.rule = blocks(TensorView(bits.data(), ElementType::uint8, {batch, heads, 3, 2}), 64, 64);
      options.key_lengths = TensorView(lengths.data(), ElementType::int32, {batch});
    }
    out = results({batch, heads, queries, d}), lse = results({batch, heads, queries});
    row_sum = results({batch, heads, queries}), row_max = results({batch, heads, queries});
    gradients.dq = results({batch, heads, queries, d});
    gradients.dk = results({batch, heads_kv, keys, d}), gradients.dv = results({batch, heads_kv, keys, d});
    gradients.dbias = results(bias);
  }

  TensorView numbers(std::initializer_list<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const auto size : shape) count *= size;
    std::normal_distribution<float> normal;
    auto& made = memory.emplace_back(count);
    for (auto& number : made) number = normal(random);
    return {made.data(), ElementType::float32, shape};
  }
  TensorView results(std::initializer_list<std::int64_t> shape) {
    const auto made = numbers(shape);
    result_memory.push_back(memory.size() - 1);
    return made;
  }
  std::vector<std::size_t> result_memory;

  /// Both passes, in parts of so many groups, 0: in one. The number of parts comes with the results.
  std::pair<std::vector<std::vector<float>>, int> run(std::int64_t groups) {
    int parts = 0;
    for (const auto i : result_memory) std::fill(memory[i].begin(), memory[i].end(), -7.0f);
    for (auto problem : {forward_problem(q, k, v, {out, lse, row_sum, row_max}, options),
                         backward_problem({dout, out, lse, dlse}, q, k, v, gradients, options)}) {
      const auto& backend = backend_of(problem.device);
      const auto plan = make_plan(problem, backend.menu(problem));
      problem.chunks.groups = groups;
      for_each_part(problem, *plan, [&](const Problem& part, const ExecutionPlan& of_part) {
        const auto workspace = backend.allocate(part, of_part);
        (part.direction == Direction::forward ? backend.forward : backend.backward)(part, of_part, workspace.get());
        ++parts;
      });
    }
    std::vector<std::vector<float>> made;
    for (const auto i : result_memory) made.push_back(memory[i]);
    return {made, parts};
  }
};

TEST(Parts, GiveTheBitsOfTheWhole) {
  for (const bool batch_bias : {false, true})
    for (const bool head_bias : {false, true})
      for (const bool sink : {false, true})
        for (const bool masks : {false, true}) {
          Call call(batch_bias, head_bias, sink, masks);
          const auto [whole, one] = call.run(0);
          EXPECT_EQ(one, 2);
          for (const std::int64_t groups : {1, 4, 6}) {
            const auto [made, parts] = call.run(groups);
            for (std::size_t i = 0; i < made.size(); ++i)
              EXPECT_EQ(std::memcmp(made[i].data(), whole[i].data(), made[i].size() * sizeof(float)), 0)
                  << "result " << i << ", " << groups << " groups, " << batch_bias << head_bias << sink << masks;
            EXPECT_EQ(parts > 2, groups < 6);
          }
        }
}

TEST(Parts, DoNotDivideWhatIsSummed) {
  Call call(false, false, true, true);
  const auto of_forward = 6, of_backward = 1;  // both axes of dbias are summed
  EXPECT_EQ(call.run(1).second, of_forward + of_backward);
  Call by_heads(false, true, true, true);
  EXPECT_EQ(by_heads.run(1).second, of_forward + 2);
  Call by_batch(true, false, false, true);
  EXPECT_EQ(by_batch.run(1).second, of_forward + 3);
}

/// Masks that a GPU finds: a part knows the first of its lengths, and the tables of its first batch entry and head.
TEST(Parts, OfLateMasksPointAtTheirOwnTables) {
  Call call(true, true, false, true);
  auto problem = forward_problem(call.q, call.k, call.v, {call.out, call.lse, {}, {}}, call.options);
  problem.tables_on_device = true;
  const auto plan = make_plan(problem, backend_of(problem.device).menu(problem));
  ASSERT_TRUE(plan->masks_on_device);
  const auto* const lengths = static_cast<const std::int32_t*>(problem.key_lengths.data);
  for (const std::int64_t groups : {1, 2, 4}) {
    problem.chunks = {.groups = groups, .portable = true};
    std::int64_t seen = 0;
    for_each_part(problem, *plan, [&](const Problem& part, const ExecutionPlan& of_part) {
      const auto b = static_cast<const std::int32_t*>(part.key_lengths.data) - lengths;
      const auto h = (part.q.data - problem.q.data) / 4 % (heads * queries * d) / (queries * d);
      ASSERT_TRUE(of_part.masks_on_device);
      ASSERT_EQ(of_part.groups.size(), 1u);
      EXPECT_TRUE(part.chunks.portable);
      EXPECT_EQ(part.key_lengths.shape[0], part.batch);
      EXPECT_EQ(of_part.batch_groups, part.batch);
      EXPECT_EQ(of_part.head_groups, part.heads_q);
      EXPECT_EQ(of_part.groups[0].program.atoms[0].data, call.bits.data() + (b * heads + h) * 6);
      seen += part.batch * part.heads_q;
    });
    EXPECT_EQ(seen, batch * heads);
  }
}

}  // namespace
}  // namespace anyflash::planning
