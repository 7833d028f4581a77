#include "plan/cost.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "rules/words.h"

namespace anyflash::planning {
namespace {

constexpr int sampled_tiles = 48, rows_at_a_time = 8, keys_at_a_time = 16;  // the last two as the kernels compute them

/// The share of a partial tile that is computed.
double computed_share(const ExecutionPlan& plan, const MaskGroup& group, std::int32_t query_block,
                      std::int32_t key_block) {
  const Box queries = plan.query_grid.box(query_block), keys = plan.key_grid.box(key_block);
  const auto rows = static_cast<std::int32_t>(rules::volume(queries.extent));
  double computed = 0;
  rules::WordsOfKeys words(group.program, keys);
  for (std::int32_t first = 0; first < rows; first += rows_at_a_time) {
    std::uint64_t seen = 0;
    for (auto row = first; row < first + rows_at_a_time; ++row) {
      const auto query = queries.entry(row);
      if (rules::inside(query, plan.query_grid.size)) seen |= words(query);
    }
    if (seen == 0) continue;
    const int begin = std::countr_zero(seen) / keys_at_a_time, end = (63 - std::countl_zero(seen)) / keys_at_a_time;
    computed += rows_at_a_time * keys_at_a_time * (end - begin + 1);
  }
  return computed / (double(rows) * 64);
}

double padded(std::int64_t channels) { return double((channels + 15) / 16 * 16); }

const Calibration::Speed& speed_of(const Calibration& machine, ElementType type) {
  switch (type) {
    case ElementType::float16: return machine.float16;
    case ElementType::bfloat16: return machine.bfloat16;
    case ElementType::float64: return machine.float64;
    default: return machine.float32;
  }
}

/// How many times as fast as one thread.
double speedup(const Calibration& machine, double threads) {
  if (threads <= 1 || machine.threads <= 1) return std::max(threads > 1 ? machine.parallel : 1.0, 1.0);
  return 1 + (threads - 1) * (machine.parallel - 1) / (machine.threads - 1);
}

}  // namespace

Work work_of(const ExecutionPlan& plan) {
  Work work;
  const auto rows = rules::volume(plan.query_grid.extent);
  work.query_blocks_rows = double(rows);
  std::int64_t seen = 0;
  double sampled = 0, shares = 0;
  for (const auto& group : plan.groups)
    for (const Run& run : group.keys_of_query_block.runs)
      (run.kind == TileClass::full ? work.full : work.partial_tiles) += run.count;
  const auto every = std::max<std::int64_t>(std::int64_t(work.partial_tiles) / sampled_tiles, 1);
  for (const auto& group : plan.groups) {
    const auto& [start, runs] = group.keys_of_query_block;
    for (std::size_t block = 0; block + 1 < start.size(); ++block)
      for (auto r = start[block]; r < start[block + 1]; ++r) {
        if (runs[r].kind == TileClass::full) continue;
        const auto before = seen;
        seen += runs[r].count;
        const auto next = (before + every - 1) / every * every;
        if (next >= seen) continue;
        shares += computed_share(plan, group, std::int32_t(block), std::int32_t(runs[r].first + (next - before)));
        sampled += 1;
      }
  }
  work.key_loads = work.full + work.partial_tiles;
  const double tiles = double(rows) / 64;
  work.full *= tiles;
  work.partial = sampled > 0 ? work.partial_tiles * tiles * shares / sampled : 0;
  return work;
}

PlanCost cost_of(const Problem& problem, const ExecutionPlan& plan, const Work& work, const Calibration& machine) {
  const auto& chunks = problem.chunks;
  const auto& speed = speed_of(machine, problem.type);
  const bool forward = problem.direction == Direction::forward;
  const double of_mask = double(problem.batch * problem.heads_q) / double(plan.batch_groups * plan.head_groups);
  const double heads = double(problem.batch * problem.heads_q), groups = double(problem.batch * problem.heads_kv);
  const double channels = padded(problem.d_qk) + padded(problem.d_v), heads_of_group = heads / std::max(groups, 1.0);
  const double chunks_q = double(std::max<std::int64_t>(chunks.q, 1));
  const double chunks_kv = double(std::max<std::int64_t>(chunks.kv, 1));
  const bool in_chunks = chunks.q > 0 || chunks.kv > 0;
  const double at_once = chunks.groups > 0 ? std::min(double(chunks.groups), groups) : groups;
  const double q_blocks = double(plan.query_grid.count()), k_blocks = double(plan.key_grid.count());

  const double tile = forward ? speed.forward_tile + speed.forward_channel * channels
                              : speed.backward_tile + speed.backward_channel * channels;
  const double partial = forward ? speed.partial : speed.backward_partial;
  double compute = (work.full + work.partial * partial) * of_mask * tile;
  const bool two_passes = !forward && in_chunks && chunks_kv > 1 && problem.dq.given();
  if (two_passes) compute *= problem.dk.given() || problem.dv.given() ? 7.0 / 5 : 3.0 / 5;

  // Tasks that can run at the same time, and steps of the call, each of which waits for its slowest thread.
  double tasks = heads * q_blocks, steps = 1;
  if (forward) {
    tasks = at_once * heads_of_group * q_blocks / chunks_q;
    steps = std::ceil(groups / at_once) * chunks_q * chunks_kv;
  } else if (in_chunks) {
    tasks = k_blocks / chunks_kv;
    steps = heads * chunks_q * chunks_kv * (two_passes ? 2 : 1);
  } else {
    tasks = at_once * k_blocks;
    steps = std::ceil(groups / at_once);
  }
  tasks = std::max(tasks, 1.0);
  const double threads = std::min(double(threads_of(problem, plan)), tasks);
  const double rounds = std::ceil(tasks / threads) * threads / tasks;  // some threads have a task less
  const double fast = speedup(machine, threads) / (tasks < 8 * threads ? rounds : 1);

  // Key blocks are packed once for a thread that takes a group, or at each visit if too few of them stay.
  const double visits = work.key_loads * of_mask, visited = std::min(groups * k_blocks, visits);
  const bool all_stay = chunks.kept == 0 || double(chunks.kept) >= double(plan.most_keys);
  const double packed = (forward && !all_stay ? visits : visited * std::max(1.0, threads / std::max(at_once, 1.0))) *
                        (forward ? 1 : chunks_q);
  const double rows = heads * double(problem.queries()) * chunks_kv;
  double numbers = packed * 64 * channels + rows * channels * (forward ? 1 : 3);
  if (forward && chunks_kv > 1) numbers += rows * (padded(problem.d_v) + 36);
  if (!forward && chunks.kept == 1) numbers += visits * work.query_blocks_rows * channels;
  PlanCost cost;
  constexpr double mapped_step = 2e-3;  // the pages of mapped tensors are given back and come again
  cost.compute = compute / fast + steps * machine.step * (threads > 1 ? 1 : 0.25);
  if (problem.tensors_in_budget) cost.memory += steps * mapped_step;
  cost.memory += numbers * speed.number / fast;
  return cost;
}

}  // namespace anyflash::planning
