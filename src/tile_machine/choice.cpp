// The mapping of a call: the best that the search finds within its memory.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>

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
  if (!lse.given()) return problem.large_lse;
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

/// What does not fit a budget, not evaluated: its peak is the least budget that works.
Evaluation too_large(const Bounded& least) {
  Evaluation evaluation;
  evaluation.mapping = least.mapping, evaluation.peak = least.bytes;
  return evaluation;
}

void evaluate_too_large(const Call& call, Evaluation& one) {
  if (!one.phases.empty()) return;
  const auto least = one.peak;
  one = evaluate(any_results(call), one.mapping);
  one.peak = least;
}

std::vector<Evaluation> within_memory(const Call& call) {
  std::optional<BoundedMappings> mappings;
  bool scarce = false;
  if (call.budget < call.machine_memory()) {
    const auto least = mappings.emplace(call).smallest();
    if (least.bytes > call.budget) return {too_large(least)};
    scarce = call.budget < least.bytes / 4 * 5;
  }
  for (const bool staggered : {false, true}) {
    if (staggered ? !call.backward : call.backward && scarce) continue;
    auto all = search(call, staggered);
    if (!all.empty() && all.front().fits(call)) return all;
  }
  if (!mappings) mappings.emplace(call);
  return {evaluate(call, mappings->fastest_within(call.memory()).mapping)};
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

/// deterministic: the mapping depends on the budget and the sizes of one unit alone, not on the batch and what its masks
/// hold. As many units compute at once as there are tiles for.
class OfOneUnit {
 public:
  explicit OfOneUnit(const Call& call) : call_(call) {
    show_all(call.plan, shown_);
    one_.emplace(any_results({call.problem, shown_, call.machine, call.choice}));
    one_->units = 1, one_->budget = std::numeric_limits<std::int64_t>::max();
  }

  std::vector<Evaluation> usual() const {
    std::vector<Evaluation> all;
    for (const auto& of_one : within_memory(*one_)) all.push_back(evaluate(call_, of_all(of_one.mapping)));
    return all;
  }
  /// One unit takes a quarter of the budget, rounded down to a power of two, or the least that it can. What usual()
  /// refuses may fit here, and the reverse.
  std::vector<Evaluation> within_budget() {
    const auto found = bounded();
    return {found.bytes > call_.memory() ? too_large(found) : evaluate(call_, found.mapping)};
  }
  std::int64_t least() { return bounded().bytes; }

 private:
  /// The mapping of the call's budget, and the least budget from which on all work: going down, until one does not.
  Bounded bounded() {
    BoundedMappings of_unit(*one_), of_call(call_);
    std::optional<Bounded> found;
    auto end = call_.machine_memory() + 1;  // of the budgets with this mapping
    for (auto begin = std::int64_t(std::bit_floor(std::uint64_t(call_.machine_memory()))); end > 0; begin /= 2) {
      const auto [of_one, bytes] = of_unit.fastest_within(begin / 4);
      if (bytes > begin / 4) begin = 0;
      const auto mapping = of_all(of_one);
      const auto needed = std::max(begin, of_call.bytes_of(mapping));
      if (!found) found = {mapping, needed};
      if (needed >= end) break;
      if (call_.memory() < end) found->mapping = mapping;
      found->bytes = needed;
      if (needed > begin) break;
      end = begin;
    }
    return *found;
  }

  Mapping of_all(Mapping mapping) const {
    mapping.at_once = std::clamp<std::int64_t>(call_.machine.tiles / mapping.tiles_each(), 1, call_.units);
    mapping.waves = (call_.units + mapping.at_once - 1) / mapping.at_once;
    return mapping;
  }

  const Call& call_;
  ExecutionPlan shown_;
  std::optional<Call> one_;
};

std::vector<Evaluation> choose(const Call& call) {
  check_choice(call);
  if (!call.problem.deterministic) return within_memory(call);
  OfOneUnit unit(call);
  return call.problem.memory_budget ? unit.within_budget() : unit.usual();
}

void check_fits(const Call& call, Evaluation& evaluation) {
  if (evaluation.fits(call)) return;
  if (evaluation.peak <= call.machine_memory()) {
    throw Error(Error::Kind::value, "memory_budget: " + std::to_string(call.budget) + " bytes, expected at least " +
                                        std::to_string(evaluation.peak));
  }
  const bool bounded = evaluation.phases.empty();
  evaluate_too_large(call, evaluation);
  const auto& phase = evaluation.phases[evaluation.peak_phase];
  const auto& m = evaluation.mapping;
  throw Error(Error::Kind::memory,
              "tile machine " + call.machine.name + ": tile " + std::to_string(phase.live_tile) + ", phase '" +
                  phase.name(m.waves) + "': " + (bounded ? "up to " : "") + std::to_string(evaluation.peak) +
                  " bytes live" + (bounded ? " under a memory_budget" : "") + ", expected at most " +
                  std::to_string(call.machine_memory()) + "; with " + std::to_string(m.query_chunks) + " query and " +
                  std::to_string(m.key_chunks) + " key chunks");
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
      lse_remainders(backward && (problem.deterministic || has_large_lse(problem))) {
  lopsided = is_lopsided(plan, keys);
  known_weights = std::make_shared<KnownWeights>();
  constexpr std::size_t most_blocks = 4096;
  std::size_t blocks = 0;
  for (const auto& group : plan.groups) blocks += group.keys_of_query_block.start.size();
  if (blocks > most_blocks) return;
  for (const auto& group : plan.groups) hulls.emplace_back(group, queries, keys);
}

Call any_results(const Call& call) {
  auto any = call;
  any.statistics = 3, any.lse_remainders = call.backward;
  return any;
}

bool better(const Call& call, const Evaluation& a, const Evaluation& b) {
  const bool fit_a = a.fits(call), fit_b = b.fits(call);
  if (fit_a != fit_b) return fit_a;
  return fit_a ? a.cycles < b.cycles : a.peak < b.peak;
}

std::vector<Evaluation> candidates(const Call& call) {
  auto all = choose(call);
  evaluate_too_large(call, all.front());
  return all;
}

std::int64_t least_memory(const Call& call) {
  check_choice(call);
  return call.problem.deterministic ? OfOneUnit(call).least() : BoundedMappings(call).smallest().bytes;
}

Evaluation best(const Call& call) {
  auto all = choose(call);
  check_fits(call, all.front());
  return std::move(all.front());
}

}  // namespace anyflash::simulator
