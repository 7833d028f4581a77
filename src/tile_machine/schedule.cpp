#include "tile_machine/schedule.h"

#include <algorithm>
#include <numeric>

namespace anyflash::simulator {
namespace {

struct Visit {
  std::int32_t chunk;
  double cycles;
};

/// Deals visits to phases, the heaviest first, each to the phase with the least work that still has room.
TileWork dealt(std::vector<Visit> visits, std::int64_t phases, std::int64_t in_flight) {
  TileWork work;
  work.chunks.resize(phases);
  work.cycles.assign(phases, 0);
  std::stable_sort(visits.begin(), visits.end(), [](const Visit& a, const Visit& b) { return a.cycles > b.cycles; });
  for (const auto& visit : visits) {
    std::int64_t best = -1;
    for (std::int64_t phase = 0; phase < phases; ++phase) {
      if (std::int64_t(work.chunks[phase].size()) >= in_flight) continue;
      if (best < 0 || work.cycles[phase] < work.cycles[best]) best = phase;
    }
    work.chunks[best].push_back(visit.chunk);
    work.cycles[best] += visit.cycles;
  }
  return work;
}

}  // namespace

const std::vector<double>& Scheduler::weights(const MaskGroup& mask) {
  auto& weights = weights_[&mask];
  if (!weights.empty()) return weights;
  weights.assign(mapping_.query_chunks * mapping_.key_chunks, 0);
  Steps steps(call_.queries, call_.keys);
  for (std::int64_t a = 0; a < mapping_.query_chunks; ++a)
    for (std::int64_t b = 0; b < mapping_.key_chunks; ++b) {
      auto& weight = weights[a * mapping_.key_chunks + b];
      steps.of(mask, call_.query_chunk(mapping_, a), call_.key_chunk(mapping_, b),
               [&](Range rows, Range keys, bool partial) { weight += cost_.step(rows.size(), keys.size(), partial); });
    }
  return weights;
}

/// Longest first, each to the row with the least work so far; no row gets more items than it must.
void Scheduler::deal_items(Schedule& schedule, const std::vector<const MaskGroup*>& masks) {
  const auto count = std::int64_t(masks.size()) * mapping_.query_chunks;
  const auto most = (count + mapping_.rows - 1) / mapping_.rows;
  std::vector<Visit> items(count);
  for (std::int64_t item = 0; item < count; ++item) {
    const auto& weights = this->weights(*masks[item / mapping_.query_chunks]);
    const auto from = weights.begin() + item % mapping_.query_chunks * mapping_.key_chunks;
    items[item] = {std::int32_t(item), std::accumulate(from, from + mapping_.key_chunks, 0.0)};
    schedule.cycles += items[item].cycles;
  }
  std::stable_sort(items.begin(), items.end(), [](const Visit& a, const Visit& b) { return a.cycles > b.cycles; });
  schedule.items.resize(mapping_.rows);
  schedule.query_rows.assign(mapping_.rows, 0);
  using Load = std::pair<double, std::int64_t>;
  std::vector<Load> heap;
  for (std::int64_t row = 0; row < mapping_.rows; ++row) heap.emplace_back(0, row);
  const auto later = [](const Load& a, const Load& b) { return a > b; };
  for (const auto& item : items) {
    std::pop_heap(heap.begin(), heap.end(), later);
    auto& [load, row] = heap.back();
    schedule.items[row].push_back(item.chunk);
    schedule.query_rows[row] += call_.query_chunk(mapping_, item.chunk).size();
    load += item.cycles;
    if (std::int64_t(schedule.items[row].size()) < most) std::push_heap(heap.begin(), heap.end(), later);
    else heap.pop_back();
  }
  for (auto& row : schedule.items) std::sort(row.begin(), row.end());
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
      double cycles = 0;
      for (const auto* weights : rows) cycles += weights[chunk];
      if (cycles == 0) continue;
      auto& tile = visits[row * mapping_.columns + chunk % mapping_.columns];
      tile.push_back({std::int32_t(chunk), cycles});
      most = std::max(most, tile.size());
    }
  }
  schedule.phases = (std::int64_t(most) + mapping_.in_flight - 1) / mapping_.in_flight;
  for (auto& tile : visits) schedule.tiles.push_back(dealt(std::move(tile), schedule.phases, mapping_.in_flight));
}

const Schedule& Scheduler::of(std::int64_t unit) {
  std::vector<const MaskGroup*> masks;
  for (std::int64_t head = 0; head < call_.heads_each; ++head) masks.push_back(&call_.mask(unit, head));
  auto& schedule = schedules_[masks];
  if (schedule.tiles.empty()) {
    deal_items(schedule, masks);
    fill_phases(schedule, masks);
  }
  return schedule;
}

}  // namespace anyflash::simulator
