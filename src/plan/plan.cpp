// Problem -> ExecutionPlan: the different masks, the boxes, the runs.
#include "plan/plan.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <string>

#include "plan/boxes.h"
#include "plan/cache.h"
#include "plan/facts.h"
#include "plan/own_of_thread.h"
#include "plan/runs.h"
#include "plan/threads.h"
#include "problem/tensor.h"
#include "rules/axis.h"
#include "rules/node.h"

namespace anyflash {
namespace planning {
namespace {

// For most rules the search of a query block takes about 32 questions of 30 ns; where a dense mask has to be read, one
// for each key block; where runs are read off documents, the time of a few. Waking threads costs as much as some 1000
// questions, and ten times that on a busy machine.
constexpr std::int64_t few_questions = 4, usual_questions = 32, task_questions = 8192,
                       parallel_questions = 4 * task_questions;

constexpr double most_in_dimension = 1 << 30;  // coordinates and block numbers are 32 bits wide
constexpr double most_blocks = std::numeric_limits<std::int32_t>::max();

/// Calls work(0) .. work(count - 1) in threads. An exception is passed on.
template <typename Work>
void in_parallel(std::int64_t count, int threads, const Work& work) {
  std::exception_ptr failed;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && count > 1)
  for (std::int64_t i = 0; i < count; ++i) {
    try {
      work(i);
    } catch (...) {
#pragma omp critical(anyflash_plan_failed)
      failed = std::current_exception();
    }
  }
  if (failed) std::rethrow_exception(failed);
}

/// The runs of some query blocks.
struct Part {
  std::vector<std::int32_t> runs_of_block;
  std::vector<Run> runs;
};

RunList joined(const Part* parts, std::int64_t count) {
  RunList list;
  std::size_t blocks = 0, runs = 0;
  for (auto part = parts; part != parts + count; ++part) {
    blocks += part->runs_of_block.size();
    runs += part->runs.size();
  }
  list.start.reserve(blocks + 1);
  list.runs.reserve(runs);
  list.start.push_back(0);
  for (auto part = parts; part != parts + count; ++part) {
    for (const auto number : part->runs_of_block) list.start.push_back(list.start.back() + number);
    list.runs.insert(list.runs.end(), part->runs.begin(), part->runs.end());
  }
  return list;
}

void check_size(Int3 size, const char* name) {
  for (const auto entries : size.v) {
    if (entries > most_in_dimension) {
      throw Error(Error::Kind::unsupported, std::string(name) + ": " + std::to_string(entries) +
                                                " entries in one dimension, at most 2^30 are offered");
    }
  }
}

/// The candidates whose blocks can be numbered in 32 bits.
std::vector<Cut> possible_cuts(const Problem& problem, const TileMenu& menu, Int3 stride) {
  check_size(problem.q_size, "query");
  check_size(problem.k_size, "key");
  auto cuts = candidate_cuts(problem, menu, stride);
  const auto blocks = [](const Grid& grid) { return double(grid.blocks(0)) * grid.blocks(1) * grid.blocks(2); };
  std::erase_if(cuts, [&](const Cut& cut) { return std::max(blocks(cut.queries), blocks(cut.keys)) > most_blocks; });
  if (cuts.empty()) {
    throw Error(Error::Kind::unsupported, "query and key: sequences of more than 2^31 blocks are not offered");
  }
  return cuts;
}

/// Fills keys_of_query_block of every group, and its transpose for a backward plan.
void find_runs(ExecutionPlan& plan, const std::vector<Int3>& k_sizes, std::int64_t questions, bool backward) {
  const auto blocks = plan.query_grid.count(), groups = std::int64_t(plan.groups.size());
  std::vector<RunFinder> finders;
  for (std::int64_t g = 0; g < groups; ++g) {
    finders.emplace_back(plan.groups[g].program, plan.query_grid, plan.key_grid, k_sizes[g], backward);
    if (finders.back().asks_nothing()) questions = few_questions;
  }
  const auto part_blocks = std::max<std::int64_t>(1, task_questions / questions);
  const auto parts_each = std::max<std::int64_t>(1, (blocks + part_blocks - 1) / part_blocks);
  const int threads = double(groups) * double(blocks) * double(questions) < parallel_questions ? 1 : plan.threads;
  std::vector<Part> parts(groups * parts_each);
  in_parallel(groups * parts_each, threads, [&](std::int64_t task) {
    const auto group = task / parts_each, first = task % parts_each * part_blocks;
    auto& part = parts[task];
    auto finder = finders[group];
    for (auto block = first; block < std::min(first + part_blocks, blocks); ++block) {
      const auto before = part.runs.size();
      finder.find(std::int32_t(block), part.runs);
      part.runs_of_block.push_back(std::int32_t(part.runs.size() - before));
    }
  });
  in_parallel(groups, threads, [&](std::int64_t g) {
    auto& group = plan.groups[g];
    group.keys_of_query_block = joined(&parts[g * parts_each], parts_each);
    if (backward) group.queries_of_key_block = transpose(group.keys_of_query_block, plan.key_grid.count());
  });
}

/// Compiles a program for each batch entry and head whose mask differs from the others'; returns the number of keys of
/// each.
std::vector<Int3> compile_groups(const Problem& problem, const rules::Facts& facts, ExecutionPlan& plan) {
  const auto shapes = shapes_of(problem);
  const auto tables = std::make_shared<rules::Tables>();
  const bool lengths = problem.key_lengths.given();
  plan.batch_groups = facts.batch_varies || lengths ? problem.batch : 1;
  plan.head_groups = facts.heads_vary ? problem.heads_q : 1;
  if (plan.masks_on_device) {
    plan.groups.resize(1);
    plan.groups[0].program = rules::compile(problem.rule, shapes, 0, 0, *tables, -1, true);
    plan.tables = tables;
    return {problem.k_size};
  }
  const bool nobody = facts.tables && (problem.batch == 0 || problem.heads_q == 0);  // tables have no rows either
  plan.groups.resize(nobody ? 0 : plan.batch_groups * plan.head_groups);
  std::vector<Int3> k_sizes(plan.groups.size(), problem.k_size);
  for (std::int64_t g = 0; g < std::int64_t(plan.groups.size()); ++g) {
    const auto b = g / plan.head_groups, h = g % plan.head_groups;
    const auto length = lengths ? integer_at(problem.key_lengths, b) : -1;
    if (lengths) k_sizes[g][2] = std::int32_t(length);
    if (rules::volume(k_sizes[g]) == 0) continue;  // no word will be needed
    plan.groups[g].program = rules::compile(problem.rule, shapes, b, h, *tables, length);
  }
  plan.tables = tables;
  return k_sizes;
}

/// The boxes must not depend on other batch entries: key lengths and tables that may differ in the batch are ignored.
Cut chosen_cut(const Problem& problem, const TileMenu& menu, Int3 stride, const std::vector<Cut>& cuts,
               const ExecutionPlan& plan) {
  if (cuts.size() == 1) return cuts.front();
  const bool blind = rules::table_axes(problem.rule).batch_axis;
  if (!blind && !problem.key_lengths.given()) {
    return cheapest_cut(cuts, plan.groups[0].program, menu, problem.k_size);
  }
  auto general = problem;
  auto middle = menu;
  if (blind) {
    general.rule = rules::without_batch_tables(problem.rule);
    std::sort(middle.query_rows.begin(), middle.query_rows.end());
    middle.query_rows = {middle.query_rows[middle.query_rows.size() / 2]};
  }
  const auto [program, tables] = first_program(general);
  return cheapest_cut(possible_cuts(problem, middle, stride), program, middle, problem.k_size);
}

/// The most blocks that one block visits.
std::int64_t most_met(const RunList& list) {
  std::int64_t most = 0;
  for (std::size_t block = 0; block + 1 < list.start.size(); ++block) {
    std::int64_t met = 0;
    for (auto i = list.start[block]; i < list.start[block + 1]; ++i) met += list.runs[i].count;
    most = std::max(most, met);
  }
  return most;
}

void count_tiles(ExecutionPlan& plan) {
  for (const auto& group : plan.groups) {
    plan.most_keys = std::max(plan.most_keys, most_met(group.keys_of_query_block));
    plan.most_queries = std::max(plan.most_queries, most_met(group.queries_of_key_block));
    for (const Run& run : group.keys_of_query_block.runs) plan.tiles += run.count;
  }
}

std::shared_ptr<ExecutionPlan> new_plan(const Problem& problem, const TileMenu& menu, const rules::Facts& facts,
                                        int threads, bool keep) {
  auto plan = std::make_shared<ExecutionPlan>();
  plan->threads = threads;
  plan->kept = plan->shares_words = keep;
  plan->masks_on_device = problem.tables_on_device;
  const bool blind = plan->masks_on_device && facts.tables;  // no tile's class can be computed
  const auto cuts = possible_cuts(problem, menu, blind ? Int3{{1, 1, 1}} : facts.stride);
  const auto k_sizes = compile_groups(problem, facts, *plan);
  const bool empty = problem.queries() == 0 || problem.keys() == 0 || plan->groups.empty();
  const auto cut = empty || blind ? cuts.front() : chosen_cut(problem, menu, facts.stride, cuts, *plan);
  plan->query_grid = cut.queries;
  plan->key_grid = cut.keys;
  const auto questions = facts.matrices ? std::max(usual_questions, cut.keys.count()) : usual_questions;
  if (!blind) find_runs(*plan, k_sizes, questions, problem.direction == Direction::backward);
  count_tiles(*plan);
  return plan;
}

/// One block of queries that see every key: decoding, where each call has another number of keys. Such a plan is made
/// in less time than it takes to find it among others.
bool one_block_of_full(const Problem& problem, const TileMenu& menu) {
  return problem.rule.node().kind == rules::NodeKind::full && problem.direction == Direction::forward &&
         problem.device.kind == DeviceKind::cpu && problem.dimensions == 1 && problem.has_pairs() &&
         problem.queries() <= *std::min_element(menu.query_rows.begin(), menu.query_rows.end()) &&
         problem.keys() <= most_in_dimension && !problem.cu_seqlens_q.given() && !problem.key_lengths.given();
}

/// What new_plan makes of it.
std::shared_ptr<ExecutionPlan> plan_of_one_block(const Problem& problem, const TileMenu& menu, int threads) {
  auto plan = std::make_shared<ExecutionPlan>();
  const Int3 ones{{1, 1, 1}};
  plan->threads = threads;
  plan->query_grid = {
      problem.q_size, {{1, 1, *std::min_element(menu.query_rows.begin(), menu.query_rows.end())}}, ones};
  plan->key_grid = {problem.k_size, {{1, 1, menu.key_rows}}, ones};
  auto& group = plan->groups.emplace_back();
  auto& program = group.program;
  program.dimensions = 1;
  program.conjunction = true;  // of no atoms
  for (int i = 0; i < 3; ++i) program.axis[i] = rules::axis_of(problem.q_size[i], problem.k_size[i], problem.align);
  auto& [start, runs] = group.keys_of_query_block;
  const auto whole = static_cast<std::int32_t>(problem.keys() / menu.key_rows);
  runs.reserve(2);
  if (whole > 0) runs.push_back({0, whole, TileClass::full});
  if (problem.keys() % menu.key_rows != 0) runs.push_back({whole, 1, TileClass::partial});
  start = {0, static_cast<std::int64_t>(runs.size())};
  plan->most_keys = plan->tiles = (problem.keys() + menu.key_rows - 1) / menu.key_rows;
  return plan;
}

struct OwnKey {
  PlanKey key;
};

template <typename... Numbers>
void append(PlanKey& key, const Numbers&... numbers) {
  (key.append(reinterpret_cast<const char*>(&numbers), sizeof(numbers)), ...);
}

}  // namespace
}  // namespace planning

std::shared_ptr<const ExecutionPlan> make_plan(const Problem& problem, const TileMenu& menu, bool keep) {
  const int threads = planning::plan_threads(problem.threads);
  if (!keep && planning::one_block_of_full(problem, menu)) return planning::plan_of_one_block(problem, menu, threads);
  const auto shapes = planning::shapes_of(problem);
  const auto facts = rules::facts(problem.rule, shapes);
  const bool lengths = problem.key_lengths.given() && !problem.tables_on_device;
  const auto make = [&](bool kept) { return planning::new_plan(problem, menu, facts, threads, kept); };
  if (lengths || (facts.tables && problem.tables_on_device)) return make(keep);

  planning::PlanKey late;
  auto* const own = own_of_thread<planning::OwnKey>();  // reuses its memory
  auto& key = own ? own->key : late;
  key.clear();
  planning::append(key, problem.tables_on_device, problem.tables_on_device || facts.tables ? problem.batch : 0,
                   facts.tables && problem.heads_q == 0,  // then there is no mask
                   problem.direction, problem.dimensions, problem.q_size, problem.k_size, problem.align, threads,
                   menu.key_rows, menu.tile_cost, menu.query_rows.size());
  for (const auto rows : menu.query_rows) planning::append(key, rows);
  auto& cache = planning::plan_cache();
  if (!facts.tables) {
    key += facts.key;
    if (auto known = cache.find(key)) return known;
    return cache.insert(key, make(true), keep);
  }
  // The layers of a model have the same documents, the next training step has others: only what is asked for twice is
  // kept.
  if (!rules::append_with_tables(rules::with_lengths(problem.rule, shapes), key)) return make(keep);
  bool asked_before = false;
  if (auto known = cache.find(key, &asked_before)) return known;
  if (keep || asked_before) return cache.insert(key, make(true), keep);
  return make(false);
}

}  // namespace anyflash
