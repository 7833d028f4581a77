// The mapping of a call: the best that the search finds within its memory.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tile_machine/planner.h"

namespace anyflash::simulator {
namespace {

std::int64_t statistics_of(const Problem& problem) {
  if (problem.direction == Direction::backward) return problem.dlse.given() ? 3 : 2;
  return problem.row_max.given() || problem.row_sum.given() ? 3 : 1;
}

bool is_lopsided(const ExecutionPlan& plan, const Order& keys) {
  const auto half = (keys.block_of(keys.entries() - 1) + 1) / 2;
  double early = 0, late = 0;
  for (const auto& group : plan.groups)
    for (const auto& run : group.keys_of_query_block.runs) {
      const auto before = std::clamp<std::int64_t>(half - run.first, 0, run.count);
      early += double(before), late += double(run.count - before);
    }
  return std::abs(early - late) > 0.2 * (early + late);
}

bool has_large_lse(const Problem& problem) {
  const auto& lse = problem.lse;
  for (std::int64_t b = 0; b < problem.batch; ++b)
    for (std::int64_t h = 0; h < problem.heads_q; ++h)
      for (std::int64_t i = 0; i < problem.queries(); ++i) {
        const auto at = b * lse.batch + h * lse.head + i * lse.query;
        const float size = std::abs(reinterpret_cast<const float*>(lse.data)[at]);
        if (size >= Call::large_lse && std::isfinite(size)) return true;
      }
  return false;
}

void check_choice(const Call& call) {
  const auto& choice = call.choice;
  const auto tiles = std::max<std::int64_t>(choice.grid_rows, 1) * std::max<std::int64_t>(choice.grid_columns, 1);
  if (tiles > call.machine.tiles) {
    throw Error(Error::Kind::value, "grid: " + std::to_string(choice.grid_rows) + " x " +
                                        std::to_string(choice.grid_columns) + " tiles, the machine has " +
                                        std::to_string(call.machine.tiles));
  }
}

/// Mappings that need little memory, the least first: searches with ever smaller budgets, until one finds nothing less or
/// until `enough` bytes are.
std::vector<Evaluation> smallest(const Call& call, std::int64_t enough = 0) {
  auto bounded = call;
  bounded.budget = 0;
  for (std::vector<Evaluation> least;; bounded.budget = least.front().peak - 1) {
    auto found = search(bounded);
    std::stable_sort(found.begin(), found.end(),
                     [](const Evaluation& a, const Evaluation& b) { return a.peak < b.peak; });
    if (!least.empty() && found.front().peak >= least.front().peak) return least;
    for (auto& one : found) one.mapping.step_rows = typical_sizes(bounded, one.mapping).step_rows;
    least = std::move(found);
    if (least.front().peak <= enough) return least;
  }
}

std::vector<Evaluation> within_memory(const Call& call) {
  auto all = search(call);
  if (all.front().fits(call)) return all;
  all = smallest(call, call.memory());
  std::stable_sort(all.begin(), all.end(),
                   [&](const Evaluation& a, const Evaluation& b) { return better(call, a, b); });
  return all;
}

/// Makes `shown` a plan of the same blocks that shows everything.
void show_all(const ExecutionPlan& plan, ExecutionPlan& shown) {
  shown.query_grid = plan.query_grid, shown.key_grid = plan.key_grid;
  auto& list = shown.groups.emplace_back().keys_of_query_block;
  for (std::int64_t block = 0; block < plan.query_grid.count(); ++block) {
    list.start.push_back(block);
    list.runs.push_back({0, std::int32_t(plan.key_grid.count()), TileClass::full});
  }
  list.start.push_back(plan.query_grid.count());
}

/// deterministic: mappings that depend on the sizes of one unit alone, not on the batch and what its masks hold. As many
/// units compute at once as there are tiles for.
std::vector<Evaluation> for_one_unit(const Call& call) {
  ExecutionPlan shown;
  show_all(call.plan, shown);
  Call one(call.problem, shown, call.machine, call.choice);
  one.units = 1, one.budget = std::numeric_limits<std::int64_t>::max();
  auto found = within_memory(one);
  if (found.front().peak > call.budget) found = smallest(one);
  std::vector<Evaluation> all;
  for (const auto& of_one : found) {
    auto mapping = of_one.mapping;
    mapping.at_once = std::clamp<std::int64_t>(call.machine.tiles / mapping.tiles_each(), 1, call.units);
    mapping.waves = (call.units + mapping.at_once - 1) / mapping.at_once;
    all.push_back(evaluate(call, mapping));
  }
  return all;
}

}  // namespace

Call::Call(const Problem& problem, const ExecutionPlan& plan, const TileMachine& machine, const TileChoice& choice)
    : problem(problem),
      plan(plan),
      machine(machine),
      choice(choice),
      chunks_q(problem.num_chunks_q.value_or(0)),
      chunks_kv(problem.num_chunks_kv.value_or(0)),
      budget(problem.memory_budget.value_or(std::numeric_limits<std::int64_t>::max())),
      backward(problem.direction == Direction::backward),
      element(std::int64_t(element_size(problem.type))),
      heads_each(problem.heads_q / problem.heads_kv),
      units(problem.batch * problem.heads_kv),
      d_qk(problem.d_qk),
      d_v(problem.d_v),
      line_qk(line_of(problem.d_qk)),
      line_v(line_of(problem.d_v)),
      statistics(statistics_of(problem)),
      queries(plan.query_grid),
      keys(plan.key_grid),
      lse_remainders(backward && (problem.deterministic || (problem.lse.given() && has_large_lse(problem)))) {
  lopsided = is_lopsided(plan, keys);
  known_weights = std::make_shared<KnownWeights>();
  constexpr std::size_t most_blocks = 4096;
  std::size_t blocks = 0;
  for (const auto& group : plan.groups) blocks += group.keys_of_query_block.start.size();
  if (blocks > most_blocks) return;
  for (const auto& group : plan.groups) hulls.emplace_back(group, queries, keys);
}

bool better(const Call& call, const Evaluation& a, const Evaluation& b) {
  const bool fit_a = a.fits(call), fit_b = b.fits(call);
  if (fit_a != fit_b) return fit_a;
  return fit_a ? a.cycles < b.cycles : a.peak < b.peak;
}

std::vector<Evaluation> candidates(const Call& call) {
  check_choice(call);
  return call.problem.deterministic ? for_one_unit(call) : within_memory(call);
}

std::int64_t least_memory(const Call& call) {
  check_choice(call);
  if (!call.problem.deterministic) return smallest(call).front().peak;
  auto bounded = call;
  bounded.budget = 0;
  bounded.budget = for_one_unit(bounded).front().peak;
  return for_one_unit(bounded).front().peak;
}

void check_fits(const Call& call, const Evaluation& evaluation) {
  if (evaluation.fits(call)) return;
  if (evaluation.peak <= call.machine_memory() && !call.problem.deterministic) {
    throw Error(Error::Kind::value, "memory_budget: " + std::to_string(call.budget) + " bytes, expected at least " +
                                        std::to_string(evaluation.peak));
  }
  const auto& phase = evaluation.phases[evaluation.peak_phase];
  const auto& m = evaluation.mapping;
  throw Error(Error::Kind::memory, "tile machine " + call.machine.name + ": tile " + std::to_string(phase.live_tile) +
                                       ", phase '" + phase.name(m.waves) + "': " + std::to_string(phase.live) +
                                       " bytes live, expected at most " + std::to_string(call.memory()) + "; with " +
                                       std::to_string(m.query_chunks) + " query and " + std::to_string(m.key_chunks) +
                                       " key chunks");
}

Evaluation best(const Call& call) {
  auto all = candidates(call);
  check_fits(call, all.front());
  return std::move(all.front());
}

}  // namespace anyflash::simulator
