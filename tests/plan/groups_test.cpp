// Masks that differ between batch entries or heads; documents; nothing at all.
#include "helpers.h"

namespace anyflash::planning {
namespace {

TEST(Groups, OneForEachKeyLength) {
  const std::int64_t lengths[] = {0, 1, 64, 65, 500, 512};
  auto problem = problem_1d(causal(), 512, 512);
  problem.align = Align::none_end;
  problem.batch = 6;
  problem.heads_q = 3;
  problem.key_lengths = TensorView(const_cast<std::int64_t*>(lengths), ElementType::int64, {6});
  for (const auto direction : {Direction::forward, Direction::backward}) {
    problem.direction = direction;
    const auto plan = make_plan(problem, test_menu());
    ASSERT_EQ(plan->batch_groups, 6);
    ASSERT_EQ(plan->head_groups, 1);
    for (int b = 0; b < 6; ++b) {
      const auto& group = plan->group(b, 2);
      const auto columns = plan->key_grid.count();
      const auto classes = class_matrix(group.keys_of_query_block, plan->query_grid.count(), columns);
      for (std::int64_t q = 0; q < plan->query_grid.count(); ++q) {
        for (std::int64_t k = 0; k < columns; ++k) {
          const auto rows = rules::volume(plan->query_grid.extent);
          std::int64_t visible = 0;
          for (auto i = q * rows; i < std::min<std::int64_t>((q + 1) * rows, 512); ++i) {
            for (auto j = k * 64; j < std::min((k + 1) * 64, lengths[b]); ++j) visible += i >= j + 512 - lengths[b];
          }
          auto kind = visible == 0 ? TileClass::skip : TileClass::partial;
          if (visible == rows * 64) kind = TileClass::full;
          ASSERT_EQ(classes[q * columns + k], kind) << "batch entry " << b << ", tile " << q << ", " << k;
        }
      }
    }
  }
}

TEST(Groups, OneForEachMaskOfATable) {
  std::vector<std::uint8_t> bitmap(2 * 3 * 4 * 4);
  for (std::size_t i = 0; i < bitmap.size(); ++i) bitmap[i] = i * 7 % 3 == 0;
  auto problem = problem_1d(blocks(TensorView(bitmap.data(), ElementType::uint8, {2, 3, 4, 4}), 64, 64), 256, 256);
  problem.batch = 2;
  problem.heads_q = 3;
  const auto plan = make_plan(problem, test_menu());
  ASSERT_EQ(plan->batch_groups, 2);
  ASSERT_EQ(plan->head_groups, 3);
  for (int b = 0; b < 2; ++b) {
    for (int h = 0; h < 3; ++h) {
      for (int i = 0; i < 256; i += 50) {
        for (int j = 0; j < 256; j += 50) {
          EXPECT_EQ(rules::sees(plan->group(b, h).program, {{0, 0, i}}, {{0, 0, j}}),
                    bool(bitmap[((b * 3 + h) * 4 + i / 64) * 4 + j / 64]));
        }
      }
    }
  }
}

TEST(Groups, NothingToDo) {
  for (const auto direction : {Direction::forward, Direction::backward}) {
    for (const auto& [queries, keys] : {std::pair{0, 0}, {0, 100}, {100, 0}}) {
      auto problem = problem_1d(causal(), queries, keys);
      problem.direction = direction;
      const auto plan = make_plan(problem, test_menu());
      ASSERT_EQ(plan->groups.size(), 1u);
      EXPECT_EQ(plan->query_grid.count() == 0, queries == 0);
      EXPECT_EQ(plan->key_grid.count() == 0, keys == 0);
      const auto& group = plan->groups[0];
      EXPECT_EQ(std::int64_t(group.keys_of_query_block.start.size()), plan->query_grid.count() + 1);
      EXPECT_TRUE(group.keys_of_query_block.runs.empty());
      if (direction == Direction::backward) {
        EXPECT_EQ(std::int64_t(group.queries_of_key_block.start.size()), plan->key_grid.count() + 1);
      }
    }
  }
  auto problem = problem_1d(causal(), 10, 10);
  problem.batch = 0;
  std::int32_t none = 0;
  problem.key_lengths = TensorView(&none, ElementType::int32, {0});
  EXPECT_TRUE(make_plan(problem, test_menu())->groups.empty());
}

TEST(Groups, TooLargeToNumber) {
  EXPECT_THROW(make_plan(problem_1d(full(), (1 << 30) + 1, 10), test_menu()), Error);
  EXPECT_THROW(make_plan(problem_1d(full(), 10, 0x7fffffff), test_menu()), Error);
  const Int3 huge{{1 << 30, 1 << 30, 1}};
  EXPECT_THROW(make_plan(problem_of({full(), 3, {{1, 1, 1}}, huge}), test_menu()), Error);
}

TEST(Documents, ThousandsOfShortOnesCostTheirOwnArea) {
  constexpr std::int32_t documents_count = 5000, length = 37, n = documents_count * length;
  std::vector<std::int32_t> lengths(documents_count + 1);
  for (std::int32_t i = 0; i <= documents_count; ++i) lengths[i] = i * length;
  const TensorView view(lengths.data(), ElementType::int32, {documents_count + 1});
  auto problem = problem_1d(causal() & documents_packed(view, view), n, n);
  problem.direction = Direction::backward;
  const auto plan = make_plan(problem, test_menu());
  const auto& group = plan->groups[0];
  const auto rows = rules::volume(plan->query_grid.extent);
  // A block of queries meets the key blocks along the diagonal, one more where a document begins before it.
  EXPECT_LE(visited_pairs(*plan), plan->query_grid.count() * rows * (rows + 64));
  EXPECT_EQ(rows, 64);
  EXPECT_LE(std::int64_t(group.keys_of_query_block.runs.size()), 2 * plan->query_grid.count());
  EXPECT_LE(std::int64_t(group.queries_of_key_block.runs.size()), 2 * plan->key_grid.count());
  problem.rule = causal();
  problem.cu_seqlens_q = problem.cu_seqlens_k = view;
  EXPECT_EQ(visited_pairs(*make_plan(problem, test_menu())), visited_pairs(*plan)) << "cu_seqlens mean the same";
}

}  // namespace
}  // namespace anyflash::planning
