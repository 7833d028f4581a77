// Which key chunks a tile meets in which phase.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <tuple>
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
  std::vector<double> sums;    ///< of each phase's steps that sum P alone, if the call has those
};

/// The work of a unit. Units with the same masks share it.
struct Schedule {
  std::vector<std::vector<std::int32_t>> items;  ///< of each grid row: head in the unit * query chunks + query chunk
  std::vector<std::int64_t> query_rows;          ///< of each grid row
  std::vector<TileWork> tiles;                   ///< (rows, columns)
  std::int64_t phases = 1;
  std::int64_t step_rows = 1;  ///< at most, of several items that see all of a key chunk
};

/// What the query chunks of a mask cost with each key chunk.
struct Weights {
  std::vector<double> cycles;  ///< (query chunks, key chunks); 0: sees none of its keys; negative: sees all of them
  std::vector<Range> met;      ///< of each query chunk: from the first key chunk to the last that it meets
  std::vector<double> sums;    ///< of each query chunk, as if whole pairs were in steps of many rows
};

/// Weights by mask and chunk counts: many mappings share them.
class KnownWeights {
 public:
  Weights& of(const MaskGroup& mask, const Mapping& mapping, bool of_sums) {
    return weights_[{&mask, mapping.query_chunks, mapping.key_chunks, of_sums}];
  }

 private:
  std::map<std::tuple<const MaskGroup*, std::int64_t, std::int64_t, bool>, Weights> weights_;
};

/// Makes the schedules of a call under one mapping.
class Scheduler {
 public:
  Scheduler(const Call& call, const Mapping& mapping);
  const Schedule& of(std::int64_t unit);

 private:
  double step(std::int64_t rows, std::int64_t keys, bool partial) const {
    return of_sums_ ? cost_.sum_step(rows, keys, partial) : cost_.step(rows, keys, partial);
  }
  const Weights& weights(const MaskGroup& mask);
  void weigh(const MaskGroup& mask, Weights& weights) const;
  void deal_items(Schedule& schedule, const std::vector<const Weights*>& weights) const;
  void fill_phases(Schedule& schedule, const std::vector<const Weights*>& weights);
  void add_sums(Schedule& schedule, const std::vector<const MaskGroup*>& masks);
  void meet(const Schedule& schedule, std::int64_t row, const std::vector<const Weights*>& weights);
  double joined(std::int64_t rows, int size);

  const Call& call_;
  const Mapping mapping_;
  Cost cost_;
  std::int64_t least_rows_, least_keys_, step_rows_;
  std::vector<int> sizes_;          // of each key chunk: 0 or 1 key more than the least
  bool of_sums_ = false;            // steps are those that sum P alone
  std::vector<double> joined_;      // cycles of steps without hidden pairs, by rows and by size of the key chunk
  std::vector<double> cycles_;      // of a grid row with each key chunk
  std::vector<std::int32_t> open_;  // rows of its last items that see all of a key chunk
  std::map<std::vector<const MaskGroup*>, Schedule> schedules_;
};

}  // namespace anyflash::simulator
