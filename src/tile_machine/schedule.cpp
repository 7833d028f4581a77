#include "tile_machine/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include "tile_machine/layout.h"

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
  TileWork sorted{work.chunks.like(), {}, {}};
  for (std::int64_t phase = 0; phase < phases; ++phase) {
    for (const auto chunk : work.chunks[order[phase]]) sorted.chunks.add(phase, chunk);
    sorted.cycles.push_back(work.cycles[order[phase]]);
  }
  work = std::move(sorted);
}

/// Turns visits that take as long as each other, so that each grid row begins with another one. Partial dk and dv of a
/// phase then belong to many key chunks, and every tile receives about as many rows of them.
void stagger(std::vector<Visit>& visits, std::int64_t turn, std::int64_t turns) {
  for (auto first = visits.begin(); first != visits.end();) {
    const auto end = std::find_if(first, visits.end(), [&](const Visit& one) { return one.cycles != first->cycles; });
    std::rotate(first, first + (end - first) * turn / turns, end);
    first = end;
  }
}

/// Deals visits to phases, the heaviest first, each to the phase with the least work that still has room. turn, of
/// turns: see stagger.
TileWork dealt(std::vector<Visit>& visits, std::int64_t phases, std::int64_t in_flight, std::int64_t turn,
               std::int64_t turns) {
  TileWork work{{phases, in_flight}, std::vector<double>(phases), {}};
  std::stable_sort(visits.begin(), visits.end(), [](const Visit& a, const Visit& b) { return a.cycles > b.cycles; });
  stagger(visits, turn, turns);
  if (in_flight == 1) {
    for (std::size_t i = 0; i < visits.size(); ++i) {
      work.chunks.add(std::int64_t(i), visits[i].chunk);
      work.cycles[i] = visits[i].cycles;
    }
    return work;
  }
  std::vector<std::pair<double, std::int64_t>> open;  // a heap: the phase with the least work is last
  for (std::int64_t phase = 0; phase < phases; ++phase) open.emplace_back(0, phase);
  for (const auto& visit : visits) {
    std::pop_heap(open.begin(), open.end(), std::greater());
    auto& [load, phase] = open.back();
    work.chunks.add(phase, visit.chunk);
    load = work.cycles[phase] += visit.cycles;
    if (work.chunks.full(phase)) open.pop_back();
    else std::push_heap(open.begin(), open.end(), std::greater());
  }
  sort_phases(work);
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

Scheduler::Scheduler(const Call& call, const Mapping& mapping)
    : call_(call),
      mapping_(mapping),
      cost_(call),
      least_rows_(call.queries.entries() / mapping.query_chunks),
      least_keys_(call.keys.entries() / mapping.key_chunks) {
  step_rows_ = mapping.step_rows > 0 ? mapping.step_rows : typical_sizes(call, mapping).step_rows;
  joined_.resize(2 * (step_rows_ + 1));
  for (std::int64_t chunk = 0; chunk < mapping.key_chunks; ++chunk)
    sizes_.push_back(int(call.key_chunk(mapping, chunk).size() - least_keys_));
  cycles_.resize(mapping.key_chunks);
  open_.resize(mapping.key_chunks);
}

const Weights& Scheduler::weights(const MaskGroup& mask) {
  auto& weights = call_.known_weights->of(mask, mapping_, of_sums_);
  if (weights.cycles.empty()) weigh(mask, weights);
  return weights;
}

void Scheduler::weigh(const MaskGroup& mask, Weights& weights) const {
  weights.cycles.assign(mapping_.query_chunks * mapping_.key_chunks, 0);
  Steps steps(call_, cost_);
  std::array<double, 4> whole;  // chunks have one of two sizes
  for (int i = 0; i < 4; ++i) whole[i] = step(least_rows_ + i / 2, least_keys_ + i % 2, false);
  const auto rows = std::max<std::int64_t>(least_rows_, 1),
             together = std::max(cost_.worthwhile_rows(rows, least_keys_) / rows * rows, rows);
  const double joins = step(together, least_keys_, false) * double(rows) / (whole[0] * double(together));
  for (std::int64_t a = 0; a < mapping_.query_chunks; ++a) {
    const auto rows = call_.query_chunk(mapping_, a);
    const auto reach = reach_of(call_, mask.keys_of_query_block, rows);
    auto* const of_rows = &weights.cycles[a * mapping_.key_chunks];
    auto& met = weights.met.emplace_back(Range{mapping_.key_chunks, 0});
    double sum = 0;
    // The first key chunk that ends behind what is seen.
    auto b = std::max<std::int64_t>(reach.some.first * mapping_.key_chunks / call_.keys.entries() - 1, 0);
    Range keys{call_.key_chunk(mapping_, b).first, 0};
    for (; b < mapping_.key_chunks && keys.first < reach.some.end; ++b, keys.first = keys.end) {
      keys.end = keys.first + least_keys_ + sizes_[b];
      if (keys.end <= reach.some.first) continue;
      auto& weight = of_rows[b];
      if (reach.all.first <= keys.first && keys.end <= reach.all.end) {
        weight = -whole[(rows.size() - least_rows_) * 2 + sizes_[b]];
      } else {
        bool sees_all = false;
        steps.of(mask, rows, keys, [&](Range some, Range seen, bool partial) {
          weight += step(some.size(), seen.size(), partial);
          sees_all = some == rows && seen == keys && !partial;
        });
        if (sees_all) weight = -weight;
      }
      if (weight == 0) continue;
      sum += weight < 0 ? -weight * joins : weight;
      met = {std::min(met.first, b), b + 1};
    }
    weights.sums.push_back(sum);
  }
}

/// Neighbours to the same row, where rows then have about the same work: they share keys, so tiles receive less. Else the
/// longest first, each to the row with the least work so far; no row gets more items than it must.
void Scheduler::deal_items(Schedule& schedule, const std::vector<const Weights*>& weights) const {
  const auto count = std::int64_t(weights.size()) * mapping_.query_chunks;
  std::vector<double> cycles;
  for (const auto* one : weights) cycles.insert(cycles.end(), one->sums.begin(), one->sums.end());
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

/// Cycles of a step of all keys of a chunk.
double Scheduler::joined(std::int64_t rows, int size) {
  if (rows == 0) return 0;
  auto& known = joined_[rows * 2 + size];
  if (known == 0) known = step(rows, least_keys_ + size, false);
  return known;
}

/// Fills cycles_: of a grid row's items with each key chunk. Neighbours that see all of it are one step.
void Scheduler::meet(const Schedule& schedule, std::int64_t row, const std::vector<const Weights*>& weights) {
  std::fill(cycles_.begin(), cycles_.end(), 0.0);
  std::fill(open_.begin(), open_.end(), 0);
  std::int64_t last_head = -1;
  const auto flush = [&](std::int64_t chunk) {
    cycles_[chunk] += joined(open_[chunk], sizes_[chunk]);
    open_[chunk] = 0;
  };
  Range before{0, 0};  // key chunks that the last item meets
  for (const auto item : schedule.items[row]) {
    const auto head = item / mapping_.query_chunks, chunk_of_head = item - head * mapping_.query_chunks;
    const auto* const of_item = &weights[head]->cycles[chunk_of_head * mapping_.key_chunks];
    const auto met = weights[head]->met[chunk_of_head];
    const auto rows = std::int32_t(call_.query_chunk(mapping_, item).size());
    for (auto chunk = before.first; chunk < before.end; ++chunk)
      if (head != last_head || chunk < met.first || chunk >= met.end) flush(chunk);
    for (auto chunk = met.first; chunk < met.end; ++chunk) {
      const auto weight = of_item[chunk];
      if (weight < 0) {
        if (open_[chunk] + rows > step_rows_) flush(chunk);
        open_[chunk] += rows;
      } else {
        flush(chunk);
        cycles_[chunk] += weight;
      }
    }
    before = met, last_head = head;
  }
  for (auto chunk = before.first; chunk < before.end; ++chunk) flush(chunk);
}

void Scheduler::fill_phases(Schedule& schedule, const std::vector<const Weights*>& weights) {
  std::vector<std::vector<Visit>> visits(mapping_.tiles_each());
  std::size_t most = 1;
  for (std::int64_t row = 0; row < mapping_.rows; ++row) {
    meet(schedule, row, weights);
    mapping_.each_chunk([&](std::int64_t chunk, std::int64_t column) {
      if (cycles_[chunk] == 0) return;
      auto& tile = visits[row * mapping_.columns + column];
      tile.push_back({std::int32_t(chunk), cycles_[chunk]});
      most = std::max(most, tile.size());
    });
  }
  const auto chunks = mapping_.staggered ? mapping_.rounds() : std::int64_t(most);
  schedule.phases = (chunks + mapping_.in_flight - 1) / mapping_.in_flight;
  for (std::size_t tile = 0; tile < visits.size(); ++tile) {
    const auto row = std::int64_t(tile) / mapping_.columns;
    if (mapping_.staggered) {
      auto& work = schedule.tiles.emplace_back(
          TileWork{{schedule.phases, mapping_.in_flight}, std::vector<double>(schedule.phases), {}});
      for (const auto& [chunk, cycles] : visits[tile]) {
        const auto phase = mapping_.phase_of(chunk, row);
        work.chunks.add(phase, chunk);
        work.cycles[phase] += cycles;
      }
      continue;
    }
    const auto turn = call_.backward ? row : 0;
    schedule.tiles.push_back(dealt(visits[tile], schedule.phases, mapping_.in_flight, turn, mapping_.rows));
  }
}

/// Fills TileWork::sums.
void Scheduler::add_sums(Schedule& schedule, const std::vector<const MaskGroup*>& masks) {
  of_sums_ = true;
  joined_.assign(joined_.size(), 0);
  std::vector<const Weights*> weights;
  for (const auto* mask : masks) weights.push_back(&this->weights(*mask));
  for (std::int64_t row = 0; row < mapping_.rows; ++row) {
    meet(schedule, row, weights);
    for (std::int64_t column = 0; column < mapping_.columns; ++column) {
      auto& tile = schedule.tiles[row * mapping_.columns + column];
      tile.sums.assign(schedule.phases, 0);
      for (std::int64_t phase = 0; phase < schedule.phases; ++phase)
        for (const auto chunk : tile.chunks[phase]) tile.sums[phase] += cycles_[chunk];
    }
  }
  of_sums_ = false;
  joined_.assign(joined_.size(), 0);
}

const Schedule& Scheduler::of(std::int64_t unit) {
  std::vector<const MaskGroup*> masks;
  for (std::int64_t head = 0; head < call_.heads_each; ++head) masks.push_back(&call_.mask(unit, head));
  auto& schedule = schedules_[masks];
  if (schedule.tiles.empty()) {
    std::vector<const Weights*> weights;
    for (const auto* mask : masks) weights.push_back(&this->weights(*mask));
    schedule.step_rows = step_rows_;
    deal_items(schedule, weights);
    fill_phases(schedule, weights);
    if (call_.lse_remainders) add_sums(schedule, masks);
  }
  return schedule;
}

}  // namespace anyflash::simulator
