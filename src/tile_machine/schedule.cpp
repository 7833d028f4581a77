#include "tile_machine/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace anyflash::simulator {
namespace {

struct Visit {
  std::int32_t chunk;
  double cycles;
};

/// Heavy phases first, on all tiles: a phase lasts as long as the slowest tile.
void sort_phases(TileWork& work) {
  const auto phases = std::int64_t(work.cycles.size());
  std::vector<std::int64_t> order(phases);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return work.cycles[a] > work.cycles[b]; });
  TileWork sorted{work.chunks.like(), {}};
  for (std::int64_t phase = 0; phase < phases; ++phase) {
    for (const auto chunk : work.chunks[order[phase]]) sorted.chunks.add(phase, chunk);
    sorted.cycles.push_back(work.cycles[order[phase]]);
  }
  work = std::move(sorted);
}

/// Deals visits to phases, the heaviest first, each to the phase with the least work that still has room.
TileWork dealt(std::vector<Visit>& visits, std::int64_t phases, std::int64_t in_flight) {
  TileWork work{{phases, in_flight}, std::vector<double>(phases)};
  std::stable_sort(visits.begin(), visits.end(), [](const Visit& a, const Visit& b) { return a.cycles > b.cycles; });
  for (std::size_t i = 0; i < visits.size(); ++i) {
    std::int64_t best = in_flight == 1 ? std::int64_t(i) : -1;
    for (std::int64_t phase = 0; in_flight > 1 && phase < phases; ++phase) {
      if (work.chunks.full(phase)) continue;
      if (best < 0 || work.cycles[phase] < work.cycles[best]) best = phase;
    }
    work.chunks.add(best, visits[i].chunk);
    work.cycles[best] += visits[i].cycles;
  }
  if (in_flight > 1) sort_phases(work);
  return work;
}

/// Keys that a query chunk may see, and those that all of its rows see wholly.
struct Reach {
  Range some, all;
};

Reach reach_of(const Call& call, const RunList& list, Range rows) {
  Reach reach{{call.keys.entries(), 0}, {0, call.keys.entries()}};
  for (auto block = call.queries.block_of(rows.first); call.queries.start(block) < rows.end; ++block) {
    Range longest;
    for (auto i = list.start[block]; i < list.start[block + 1]; ++i) {
      const auto& run = list.runs[i];
      const Range keys{call.keys.start(run.first), call.keys.start(std::int64_t(run.first) + run.count)};
      reach.some = {std::min(reach.some.first, keys.first), std::max(reach.some.end, keys.end)};
      if (run.kind == TileClass::full && keys.size() > longest.size()) longest = keys;
    }
    reach.all = {std::max(reach.all.first, longest.first), std::min(reach.all.end, longest.end)};
  }
  return reach;
}

}  // namespace

const std::vector<double>& Scheduler::weights(const MaskGroup& mask) {
  auto& weights = weights_[&mask];
  if (!weights.empty()) return weights;
  weights.assign(mapping_.query_chunks * mapping_.key_chunks, 0);
  Steps steps(call_, cost_);
  const auto least_rows = call_.queries.entries() / mapping_.query_chunks;
  const auto least_keys = call_.keys.entries() / mapping_.key_chunks;
  std::array<double, 4> whole;  // chunks have one of two sizes
  for (int i = 0; i < 4; ++i) whole[i] = cost_.step(least_rows + i / 2, least_keys + i % 2, false);
  for (std::int64_t a = 0; a < mapping_.query_chunks; ++a) {
    const auto rows = call_.query_chunk(mapping_, a);
    const auto reach = reach_of(call_, mask.keys_of_query_block, rows);
    auto* const of_rows = &weights[a * mapping_.key_chunks];
    for (std::int64_t b = 0; b < mapping_.key_chunks; ++b) {
      const auto keys = call_.key_chunk(mapping_, b);
      if (keys.end <= reach.some.first) continue;
      if (keys.first >= reach.some.end) break;
      if (reach.all.first <= keys.first && keys.end <= reach.all.end) {
        of_rows[b] = -whole[(rows.size() - least_rows) * 2 + keys.size() - least_keys];
        continue;
      }
      bool sees_all = false;
      steps.of(mask, rows, keys, [&](Range some, Range seen, bool partial) {
        of_rows[b] += cost_.step(some.size(), seen.size(), partial);
        sees_all = some == rows && seen == keys && !partial;
      });
      if (sees_all) of_rows[b] = -of_rows[b];
    }
  }
  return weights;
}

/// Neighbours to the same row, where rows then have about the same work: they share keys, so tiles receive less. Else the
/// longest first, each to the row with the least work so far; no row gets more items than it must.
void Scheduler::deal_items(Schedule& schedule, const std::vector<const MaskGroup*>& masks) {
  const auto count = std::int64_t(masks.size()) * mapping_.query_chunks;
  std::vector<double> cycles(count);
  const auto rows = call_.query_chunk(mapping_, 0).size(), keys = call_.key_chunk(mapping_, 0).size();
  const auto together = std::max(schedule.step_rows / rows * rows, rows);
  const double joins =
      cost_.step(together, keys, false) * double(rows) / (cost_.step(rows, keys, false) * double(together));
  for (std::int64_t item = 0; item < count; ++item) {
    const auto& weights = this->weights(*masks[item / mapping_.query_chunks]);
    const auto from = weights.begin() + item % mapping_.query_chunks * mapping_.key_chunks;
    for (std::int64_t chunk = 0; chunk < mapping_.key_chunks; ++chunk)
      cycles[item] += from[chunk] < 0 ? -from[chunk] * joins : from[chunk];
    schedule.cycles += cycles[item];
  }
  std::vector<std::int32_t> longest_first(count);
  std::iota(longest_first.begin(), longest_first.end(), 0);
  std::stable_sort(longest_first.begin(), longest_first.end(),
                   [&](std::int32_t a, std::int32_t b) { return cycles[a] > cycles[b]; });
  const auto most = (count + mapping_.rows - 1) / mapping_.rows;
  using Load = std::pair<double, std::int64_t>;
  std::vector<Load> heap;
  for (std::int64_t row = 0; row < mapping_.rows; ++row) heap.emplace_back(0, row);
  const auto later = [](const Load& a, const Load& b) { return a > b; };
  schedule.items.resize(mapping_.rows);
  double heaviest = 0;
  for (const auto item : longest_first) {
    std::pop_heap(heap.begin(), heap.end(), later);
    auto& [load, row] = heap.back();
    schedule.items[row].push_back(item);
    heaviest = std::max(heaviest, load += cycles[item]);
    if (std::int64_t(schedule.items[row].size()) < most) std::push_heap(heap.begin(), heap.end(), later);
    else heap.pop_back();
  }
  bool neighbours = true;
  for (std::int64_t row = 0; row < mapping_.rows && neighbours; ++row) {
    const auto items = part_of(count, mapping_.rows, row);
    const auto load = std::accumulate(cycles.begin() + items.first, cycles.begin() + items.end, 0.0);
    neighbours = load <= 1.05 * heaviest;
  }
  schedule.query_rows.assign(mapping_.rows, 0);
  for (std::int64_t row = 0; row < mapping_.rows; ++row) {
    auto& items = schedule.items[row];
    const auto own = part_of(count, mapping_.rows, row);
    if (neighbours) items.resize(own.size()), std::iota(items.begin(), items.end(), std::int32_t(own.first));
    std::sort(items.begin(), items.end());
    for (const auto item : items) schedule.query_rows[row] += call_.query_chunk(mapping_, item).size();
  }
}

/// Cycles of a grid row's items, whose weights are given, with a key chunk. Neighbours that see all of it are one step.
double Scheduler::met(const Schedule& schedule, std::int64_t row, const std::vector<const double*>& weights,
                      std::int64_t chunk) {
  const auto keys = call_.key_chunk(mapping_, chunk).size();
  const auto& items = schedule.items[row];
  double cycles = 0;
  std::int64_t rows = 0;
  const auto flush = [&] {
    if (rows == 0) return;
    auto& known = joined_[rows * 2 + keys - call_.keys.entries() / mapping_.key_chunks];
    if (known == 0) known = cost_.step(rows, keys, false);
    cycles += known;
    rows = 0;
  };
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto weight = weights[i][chunk];
    if (weight >= 0) {
      flush();
      cycles += weight;
      continue;
    }
    const auto more = call_.query_chunk(mapping_, items[i]).size();
    const bool same_head = i > 0 && items[i] / mapping_.query_chunks == items[i - 1] / mapping_.query_chunks;
    if (!same_head || rows + more > schedule.step_rows) flush();
    rows += more;
  }
  flush();
  return cycles;
}

void Scheduler::fill_phases(Schedule& schedule, const std::vector<const MaskGroup*>& masks) {
  std::vector<std::vector<Visit>> visits(mapping_.tiles_each());
  std::size_t most = 1;
  std::vector<const double*> rows;
  for (std::int64_t row = 0; row < mapping_.rows; ++row) {
    rows.clear();
    for (const auto item : schedule.items[row])
      rows.push_back(
          &weights(*masks[item / mapping_.query_chunks])[item % mapping_.query_chunks * mapping_.key_chunks]);
    for (std::int64_t chunk = 0; chunk < mapping_.key_chunks; ++chunk) {
      const double cycles = met(schedule, row, rows, chunk);
      if (cycles == 0) continue;
      auto& tile = visits[row * mapping_.columns + mapping_.column_of(chunk)];
      tile.push_back({std::int32_t(chunk), cycles});
      most = std::max(most, tile.size());
    }
  }
  schedule.phases = (std::int64_t(most) + mapping_.in_flight - 1) / mapping_.in_flight;
  for (auto& tile : visits) schedule.tiles.push_back(dealt(tile, schedule.phases, mapping_.in_flight));
}

const Schedule& Scheduler::of(std::int64_t unit) {
  std::vector<const MaskGroup*> masks;
  for (std::int64_t head = 0; head < call_.heads_each; ++head) masks.push_back(&call_.mask(unit, head));
  auto& schedule = schedules_[masks];
  if (schedule.tiles.empty()) {
    const auto largest = [](std::int64_t entries, std::int64_t parts) { return (entries + parts - 1) / parts; };
    schedule.step_rows = cost_.step_rows(largest(call_.queries.entries(), mapping_.query_chunks),
                                         largest(call_.keys.entries(), mapping_.key_chunks));
    joined_.resize(2 * (schedule.step_rows + 1));
    deal_items(schedule, masks);
    fill_phases(schedule, masks);
  }
  return schedule;
}

}  // namespace anyflash::simulator
