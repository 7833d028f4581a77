// Runs against the definition: nothing visible is missed, nothing hidden is called visible.
#include "plan/runs.h"

#include <algorithm>
#include <numeric>

#include "helpers.h"
#include "plan/boxes.h"

namespace anyflash::planning {
namespace {

/// Which block each entry lies in; checks that it is in one, and in one only.
std::vector<std::int64_t> block_of_entry(const Grid& grid) {
  std::vector<std::int64_t> found(rules::volume(grid.size), -1);
  for (std::int64_t block = 0; block < grid.count(); ++block) {
    const auto box = grid.box(std::int32_t(block));
    for (int e = 0; e < rules::volume(grid.extent); ++e) {
      const auto entry = box.entry(e);
      if (!rules::inside(entry, grid.size)) continue;
      auto& place = found[rules::flat_index(entry, grid.size)];
      EXPECT_EQ(place, -1);
      place = block;
    }
  }
  EXPECT_EQ(std::count(found.begin(), found.end(), -1), 0);
  return found;
}

/// Checks the runs of one group against `sees`, and the transpose against the runs.
void check_group(const ExecutionPlan& plan, const MaskGroup& group, Int3 k_size, bool backward) {
  const auto rows = plan.query_grid.count(), columns = plan.key_grid.count();
  const auto classes = class_matrix(group.keys_of_query_block, rows, columns);
  const auto query_blocks = block_of_entry(plan.query_grid), key_blocks = block_of_entry(plan.key_grid);
  const auto queries = rules::volume(plan.query_grid.size), keys = rules::volume(k_size);
  std::vector<std::int64_t> visible(classes.size());
  for (std::int64_t i = 0; i < queries; ++i) {
    for (std::int64_t j = 0; j < keys; ++j) {
      visible[query_blocks[i] * columns + key_blocks[j]] +=
          rules::sees(group.program, rules::coordinate_of(i, plan.query_grid.size), rules::coordinate_of(j, k_size));
    }
  }
  const auto entries = [](const std::vector<std::int64_t>& blocks, std::int64_t end, std::int64_t block) {
    return std::count(blocks.begin(), blocks.begin() + end, block);
  };
  std::vector<std::int64_t> query_entries(rows), key_entries(columns);
  for (std::int64_t q = 0; q < rows; ++q) query_entries[q] = entries(query_blocks, queries, q);
  for (std::int64_t k = 0; k < columns; ++k) key_entries[k] = entries(key_blocks, keys, k);
  const auto q_volume = rules::volume(plan.query_grid.extent), k_volume = rules::volume(plan.key_grid.extent);
  for (std::int64_t q = 0; q < rows; ++q) {
    for (std::int64_t k = 0; k < columns; ++k) {
      const auto at = q * columns + k;
      const bool whole = key_entries[k] == k_volume && (!backward || query_entries[q] == q_volume);
      auto expected = TileClass::partial;
      if (visible[at] == 0) expected = TileClass::skip;
      if (visible[at] > 0 && visible[at] == query_entries[q] * k_volume && whole) expected = TileClass::full;
      ASSERT_EQ(classes[at], expected) << "query block " << q << ", key block " << k;
    }
  }
  if (!backward) {
    EXPECT_TRUE(group.queries_of_key_block.runs.empty());
    return;
  }
  const auto transposed = class_matrix(group.queries_of_key_block, columns, rows);
  for (std::int64_t q = 0; q < rows; ++q) {
    for (std::int64_t k = 0; k < columns; ++k) ASSERT_EQ(transposed[k * rows + q], classes[q * columns + k]);
  }
}

void check_plan(const Case& c, const TileMenu& menu) {
  const auto plan = make_plan(problem_of(c), menu);
  check_group(*plan, plan->groups[0], c.k_size, c.direction == Direction::backward);
}

TEST(Runs, AreTheVisibleTiles) {
  RandomRules random(1);
  for (int i = 0; i < anyflash::testing::repeats(400); ++i) {
    const auto c = random.next(i % 4);
    SCOPED_TRACE(c.rule.text() + ", case " + std::to_string(i));
    check_plan(c, test_menu());
    if (HasFatalFailure()) return;
  }
}

TEST(Runs, HoldForEveryCut) {
  RandomRules random(2);
  for (int i = 0; i < anyflash::testing::repeats(60); ++i) {
    const auto c = random.next(2);
    SCOPED_TRACE(c.rule.text() + ", case " + std::to_string(i));
    const auto problem = problem_of(c);
    TileMenu menu = test_menu();
    menu.key_rows = i % 2 ? 128 : 64;
    const auto [program, tables] = first_program(problem);
    for (const auto& cut : candidate_cuts(problem, menu, rules::facts(c.rule, shapes_of(problem)).stride)) {
      ExecutionPlan plan;
      plan.query_grid = cut.queries;
      plan.key_grid = cut.keys;
      plan.groups.resize(1);
      auto& group = plan.groups[0];
      group.program = program;
      RunFinder finder(group.program, cut.queries, cut.keys, c.k_size, true);
      group.keys_of_query_block.start.push_back(0);
      for (std::int64_t block = 0; block < cut.queries.count(); ++block) {
        finder.find(std::int32_t(block), group.keys_of_query_block.runs);
        group.keys_of_query_block.start.push_back(std::int64_t(group.keys_of_query_block.runs.size()));
      }
      group.queries_of_key_block = transpose(group.keys_of_query_block, cut.keys.count());
      check_group(plan, group, c.k_size, true);
      if (HasFatalFailure()) return;
    }
  }
}

bool same_runs(const std::vector<anyflash::Run>& a, const std::vector<anyflash::Run>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && x.count == y.count && x.kind == y.kind;
  });
}

TEST(Runs, MovedAlongAreThoseFoundAfresh) {
  auto random = RandomRules::of_differences(7, 4);
  for (int i = 0; i < anyflash::testing::repeats(100); ++i) {
    const auto c = random.next(i % 3);
    const auto problem = problem_of(c);
    const auto [program, tables] = first_program(problem);
    for (const auto& cut : candidate_cuts(problem, test_menu(), rules::facts(c.rule, shapes_of(problem)).stride)) {
      const RunFinder fresh(program, cut.queries, cut.keys, c.k_size, i % 2 == 0);
      auto finder = fresh;
      for (std::int64_t block = 0; block < cut.queries.count(); ++block) {
        std::vector<anyflash::Run> moved, found;
        finder.find(std::int32_t(block), moved);
        RunFinder(fresh).find(std::int32_t(block), found);
        ASSERT_TRUE(same_runs(moved, found)) << c.rule.text() << ", case " << i << ", block " << block;
      }
    }
  }
}

TEST(Runs, OfDenseMasksAreExact) {
  RandomRules random(3);
  const std::int64_t n = 320;
  std::vector<std::uint8_t> mask(n * n);
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      const auto tile = (i / 64 * 3 + j / 64) % 3;
      mask[i * n + j] = tile == 0 ? 0 : tile == 1 ? 1 : std::uint8_t(random.number(0, 1));
    }
  }
  const TensorView view(mask.data(), ElementType::boolean, {n, n});
  for (const auto direction : {Direction::forward, Direction::backward}) {
    check_plan({dense(view), 1, {{1, 1, 320}}, {{1, 1, 320}}, Align::none_front, direction}, test_menu());
  }
}

TEST(Runs, OfBitmapsAreExact) {
  RandomRules random(8);
  const TileMenu menu{{64}, 64, 600.0};
  for (int i = 0; i < anyflash::testing::repeats(60); ++i) {
    const auto rows = random.number(1, 7), columns = random.number(1, 9);
    const auto block_q = 64 * random.number(1, 2), block_k = 64 * random.number(1, 3);
    std::vector<std::uint8_t> bits(rows * columns);
    for (auto& bit : bits) bit = std::uint8_t(random.number(0, 2));
    const auto rule = blocks(TensorView(bits.data(), ElementType::uint8, {rows, columns}), block_q, block_k);
    const auto queries = rows * block_q - random.number(0, block_q - 1);
    const auto keys = columns * block_k - random.number(0, block_k - 1);
    const auto direction = i % 2 ? Direction::forward : Direction::backward;
    for (const auto& one : {rule, ~rule, rule & causal()})
      check_plan({one, 1, {{1, 1, std::int32_t(queries)}}, {{1, 1, std::int32_t(keys)}}, Align::none_front, direction},
                 menu);
    if (HasFatalFailure()) return;
  }
}

TEST(Runs, OfDocuments) {
  RandomRules random(4);
  for (int i = 0; i < anyflash::testing::repeats(300); ++i) {
    auto c = random.next(2);
    if (i % 4 != 0) {
      c.dimensions = 1;
      c.q_size = {{1, 1, std::int32_t(random.number(1, 500))}};
      c.k_size = {{1, 1, std::int32_t(random.number(1, 500))}};
    }
    const auto queries = rules::volume(c.q_size), keys = rules::volume(c.k_size);
    std::vector<std::int32_t> ids_q(queries), ids_k(keys);
    const auto longest = random.number(0, 1) ? random.number(1, 200) : 1;
    const auto kinds = random.number(0, 2) ? random.number(1, 20) : random.number(1, 1000);
    for (auto* ids : {&ids_q, &ids_k}) {  // in any order, and again and again
      for (std::size_t at = 0; at < ids->size();) {
        const auto id = std::int32_t(random.number(1, kinds));
        const auto end = std::min(ids->size(), at + std::size_t(random.number(1, longest)));
        while (at < end) (*ids)[at++] = id;
      }
    }
    const TensorView q(ids_q.data(), ElementType::int32, {queries});
    const TensorView k(ids_k.data(), ElementType::int32, {keys});
    c.rule = i % 3 ? c.rule & documents(q, k) : c.rule | documents(q, k);
    SCOPED_TRACE(c.rule.text() + ", case " + std::to_string(i));
    check_plan(c, test_menu());
    if (HasFatalFailure()) return;
  }
}

TEST(Runs, OfDocumentsInOrderOnBothSidesAreTheirTiles) {
  RandomRules random(11);
  for (int i = 0; i < anyflash::testing::repeats(200); ++i) {
    Case c;
    const auto n = std::int32_t(random.number(1, 700));
    c.q_size = c.k_size = {{1, 1, n}};
    c.direction = i % 2 ? Direction::forward : Direction::backward;
    std::vector<std::int32_t> ids(n);
    for (std::int32_t at = 0, id = 0; at < n; ++id)
      for (const auto end = std::min<std::int64_t>(n, at + random.number(1, 300)); at < end;) ids[at++] = id;
    const TensorView view(ids.data(), ElementType::int32, {n});
    c.rule = i % 4 < 2 ? documents(view, view) : documents(view, view) & causal();
    SCOPED_TRACE(c.rule.text() + ", case " + std::to_string(i));
    check_plan(c, test_menu());
    if (HasFatalFailure()) return;
  }
}

/// Ids as calls bring them: in order, with gaps, negative, descending, one document, no two of one document, segments in
/// any order, any id in any place.
std::vector<std::int64_t> random_ids(RandomRules& random, std::int64_t n) {
  const auto kind = random.number(0, 6), longest = random.number(1, 300), kinds = random.number(1, 20);
  std::vector<std::int64_t> ids(n);
  std::int64_t id = random.number(-1'000'000'000'000, 1'000'000'000'000);
  for (std::int64_t at = 0; at < n;) {
    const auto end = std::min(n, at + (kind < 4 ? random.number(1, longest) : kind == 4 ? n : 1));
    id += kind == 0 ? 1 : kind == 1 ? random.number(1, 1'000'000'000) : kind == 2 ? -random.number(1, 3) : 1;
    if (kind == 3 || kind == 6) id = random.number(-kinds, kinds);
    while (at < end) ids[at++] = id;
  }
  return ids;
}

/// With a part that hides nothing the rule's runs are found by halving, from the ids' tile classes.
TEST(Runs, OfNewDocumentsAreThoseFoundByHalving) {
  RandomRules random(12);
  const auto asked = window(-1, -1);
  for (int i = 0; i < anyflash::testing::repeats(400); ++i) {
    Case c;
    const auto queries = random.number(1, 1500), keys = i % 3 ? queries : random.number(1, 1500);
    c.q_size = {{1, 1, std::int32_t(queries)}}, c.k_size = {{1, 1, std::int32_t(keys)}};
    c.direction = i % 2 ? Direction::forward : Direction::backward;
    c.align = Align(random.number(0, 3));
    auto ids_q = random_ids(random, queries);
    auto ids_k = random_ids(random, keys);
    for (std::int64_t at = 0; at < keys; ++at)
      if (random.number(0, 3) < 3) ids_k[at] = ids_q[at % queries];
    const TensorView q(ids_q.data(), ElementType::int64, {queries}), k(ids_k.data(), ElementType::int64, {keys});
    const auto rule = i % 3 ? documents(q, q) : documents(q, k);
    const TileMenu menu = i % 5 ? test_menu() : TileMenu{{64}, i % 2 ? 64 : 128, 600.0};
    for (const auto& one : {rule, rule & causal()}) {
      SCOPED_TRACE(one.text() + ", case " + std::to_string(i));
      c.rule = one;
      const auto plan = make_plan(problem_of(c), menu);
      c.rule = one & asked;
      const auto expected = make_plan(problem_of(c), menu);
      ASSERT_EQ(plan->query_grid.extent, expected->query_grid.extent);
      const auto same = [](const RunList& a, const RunList& b) {
        return a.start == b.start && same_runs(a.runs, b.runs);
      };
      ASSERT_TRUE(same(plan->groups[0].keys_of_query_block, expected->groups[0].keys_of_query_block));
      ASSERT_TRUE(same(plan->groups[0].queries_of_key_block, expected->groups[0].queries_of_key_block));
      ASSERT_EQ(plan->tiles, expected->tiles);
      if (queries * keys < 200'000) check_group(*plan, plan->groups[0], c.k_size, c.direction == Direction::backward);
      if (HasFatalFailure()) return;
    }
  }
}

/// Of too many documents for a row of bits each.
TEST(Runs, OfManyDocumentsAreThoseFoundByHalving) {
  const std::int32_t n = 1 << 16;
  std::vector<std::int32_t> ids(n);
  std::iota(ids.begin(), ids.end(), 0);
  for (std::int32_t at = 0; at < n; at += 3) ids[at] = at % 50;
  std::mt19937 random(5);
  std::shuffle(ids.begin() + n / 2, ids.end(), random);
  const TensorView view(ids.data(), ElementType::int32, {n});
  const TileMenu menu{{64}, 64, 600.0};
  const auto plan = make_plan(problem_1d(documents(view, view), n, n), menu);
  const auto expected = make_plan(problem_1d(documents(view, view) & window(-1, -1), n, n), menu);
  EXPECT_EQ(plan->groups[0].keys_of_query_block.start, expected->groups[0].keys_of_query_block.start);
  EXPECT_TRUE(same_runs(plan->groups[0].keys_of_query_block.runs, expected->groups[0].keys_of_query_block.runs));
}

/// Tile classes asked to plan n queries and n keys.
std::int64_t questions(const Rule& rule, std::int32_t n) {
  const auto problem = problem_1d(rule, n, n);
  const auto [program, tables] = first_program(problem);
  const Grid grid{problem.q_size, {{1, 1, 64}}, {{1, 1, 1}}};
  RunFinder finder(program, grid, grid, problem.k_size, false);
  std::vector<Run> runs;
  for (std::int64_t block = 0; block < grid.count(); ++block) finder.find(std::int32_t(block), runs);
  EXPECT_LE(std::int64_t(runs.size()), 3 * grid.count());
  return finder.questions();
}

TEST(Runs, CostFollowsTheLength) {
  for (const auto& rule : {local(256), causal(), full(), causal() & local(1000), prefix(5000) | causal()}) {
    const auto few = questions(rule, 1 << 15), many = questions(rule, 1 << 18);
    EXPECT_LE(many, 8 * few * 2) << rule.text();
    EXPECT_LE(many, (1 << 12) * 14) << rule.text();  // bisection without a guess: 45
  }
  EXPECT_LE(questions(local(256), 1 << 18), (1 << 12) * 3 / 2);  // one at the front, where runs are moved along
}

TEST(Runs, CostOfDocumentsInAnyOrderFollowsWhatMeets) {
  const std::int32_t n = 1 << 16;
  std::vector<std::int32_t> ids_q(n), ids_k(n);
  std::iota(ids_q.begin(), ids_q.end(), 0);
  std::iota(ids_k.begin(), ids_k.end(), 0);
  std::mt19937 random(6);
  std::shuffle(ids_q.begin(), ids_q.end(), random);
  std::shuffle(ids_k.begin(), ids_k.end(), random);
  const TensorView q(ids_q.data(), ElementType::int32, {n}), k(ids_k.data(), ElementType::int32, {n});
  for (const auto& rule : {documents(q, k), documents(q, k) & causal(), documents(q, k) & ~sink(100)}) {
    const auto problem = problem_1d(rule, n, n);
    const auto [program, tables] = first_program(problem);
    const Grid grid{problem.q_size, {{1, 1, 64}}, {{1, 1, 1}}};
    RunFinder finder(program, grid, grid, problem.k_size, false);
    std::vector<anyflash::Run> runs;
    for (std::int64_t block = 0; block < grid.count(); ++block) finder.find(std::int32_t(block), runs);
    std::int64_t tiles = 0;
    for (const auto& run : runs) tiles += run.count;
    EXPECT_LE(tiles, n);  // of more than a million
    EXPECT_LE(finder.questions(), 12 * n);
  }
}

TEST(Runs, OfManyQueriesAreTheSameOnAnyNumberOfThreads) {
  auto problem = problem_1d(local(300, 0, true) | sink(100), 100'003, 70'001);
  problem.align = Align::none_end;
  problem.direction = Direction::backward;
  problem.threads = 1;
  const auto one = make_plan(problem, test_menu());
  problem.threads = 7;
  const auto seven = make_plan(problem, test_menu());
  ASSERT_NE(one, seven);
  const auto same = [](const RunList& a, const RunList& b) { return a.start == b.start && same_runs(a.runs, b.runs); };
  EXPECT_TRUE(same(one->groups[0].keys_of_query_block, seven->groups[0].keys_of_query_block));
  EXPECT_TRUE(same(one->groups[0].queries_of_key_block, seven->groups[0].queries_of_key_block));
}

TEST(Cells, CoverTheirBlockOnce) {
  const Int3 step{{1, 2, 3}}, origin{{5, 6, 7}};
  const Int3 extents[] = {{{1, 1, 64}},  {{1, 1, 256}}, {{1, 8, 8}}, {{1, 16, 8}},
                          {{1, 16, 16}}, {{4, 4, 4}},   {{8, 4, 8}}};
  for (const auto& extent : extents) {
    const Box block{origin, extent, step};
    std::vector<int> times(rules::volume(extent));
    ASSERT_EQ(cells_of(block) * 64, rules::volume(extent));
    for (int c = 0; c < cells_of(block); ++c) {
      const auto cell = cell_of(block, c);
      ASSERT_EQ(rules::volume(cell.extent), 64);
      for (int e = 0; e < 64; ++e) {
        auto entry = cell.entry(e);
        for (int i = 0; i < 3; ++i) entry[i] = (entry[i] - origin[i]) / step[i];
        ASSERT_TRUE(rules::inside(entry, extent));
        ++times[rules::flat_index(entry, extent)];
      }
    }
    EXPECT_EQ(std::count(times.begin(), times.end(), 1), rules::volume(extent));
  }
}

}  // namespace
}  // namespace anyflash::planning
