// Which key chunks a tile meets in which phase.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "tile_machine/cost.h"
#include "tile_machine/steps.h"

namespace anyflash::simulator {

/// A list of chunks for each phase, of at most `most` each.
class PhaseLists {
 public:
  PhaseLists(std::int64_t phases, std::int64_t most) : most_(most), counts_(phases), chunks_(phases * most) {}
  std::span<const std::int32_t> operator[](std::int64_t phase) const {
    return {chunks_.data() + phase * most_, std::size_t(counts_[phase])};
  }
  PhaseLists like() const { return {std::int64_t(counts_.size()), most_}; }
  bool full(std::int64_t phase) const { return counts_[phase] >= most_; }
  void add(std::int64_t phase, std::int32_t chunk) { chunks_[phase * most_ + counts_[phase]++] = chunk; }

 private:
  std::int64_t most_;
  std::vector<std::int32_t> counts_, chunks_;
};

/// The work of one tile of a unit's grid.
struct TileWork {
  PhaseLists chunks;
  std::vector<double> cycles;  ///< of each phase's steps
};

/// The work of a unit. Units with the same masks share it.
struct Schedule {
  std::vector<std::vector<std::int32_t>> items;  ///< of each grid row: head in the unit * query chunks + query chunk
  std::vector<std::int64_t> query_rows;          ///< of each grid row
  std::vector<TileWork> tiles;                   ///< (rows, columns)
  std::int64_t phases = 1;
  std::int64_t step_rows = 1;  ///< at most, of several items that see all of a key chunk
  double cycles = 0;           ///< of all steps
};

/// Makes the schedules of a call under one mapping.
class Scheduler {
 public:
  Scheduler(const Call& call, const Mapping& mapping) : call_(call), mapping_(mapping), cost_(call) {}
  const Schedule& of(std::int64_t unit);
  /// Cycles of the steps of an item with each key chunk. 0: it sees none of its keys; negative: it sees all of them.
  const std::vector<double>& weights(const MaskGroup& mask);

 private:
  void deal_items(Schedule& schedule, const std::vector<const MaskGroup*>& masks);
  void fill_phases(Schedule& schedule, const std::vector<const MaskGroup*>& masks);

  double met(const Schedule& schedule, std::int64_t row, const std::vector<const double*>& weights, std::int64_t chunk);

  const Call& call_;
  const Mapping mapping_;
  Cost cost_;
  std::vector<double> joined_;  // cycles of steps without hidden pairs, by rows and by size of the key chunk
  std::map<const MaskGroup*, std::vector<double>> weights_;  // (query chunks, key chunks)
  std::map<std::vector<const MaskGroup*>, Schedule> schedules_;
};

}  // namespace anyflash::simulator
