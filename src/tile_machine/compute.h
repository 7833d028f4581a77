// What a tile computes in a phase, from its arena alone.
#pragma once

#include <cstdint>
#include <vector>

#include "tile_machine/kernels.h"
#include "tile_machine/tile.h"

namespace anyflash::simulator {

/// Floats on whole lines, reused.
class Buffer {
 public:
  float* of(std::int64_t count) {
    if (count > size_) {
      memory_ = hwy::AllocateAligned<float>(std::size_t(count));
      if (!memory_) throw Error(Error::Kind::memory, "tile machine: not enough memory for a step");
      size_ = count;
    }
    return memory_.get();
  }

 private:
  hwy::AlignedFreeUniquePtr<float[]> memory_;
  std::int64_t size_ = 0;
};

/// The computation of tiles by one thread of the host.
class Compute {
 public:
  Compute(const Call& call, const Mapping& mapping)
      : call_(call), mapping_(mapping), cost_(call), steps_(call, cost_) {}

  /// A unit's accumulators at its beginning.
  void begin(Tile& tile);
  /// Backward: delta of the rows at home.
  void row_sums(Tile& tile);
  /// The steps of all items with the key chunks of a phase. sums: of these P is only summed.
  void keys(Tile& tile, std::int64_t unit, const Schedule& schedule, std::int64_t phase, bool sums = false);
  /// Backward: what lse lost to rounding, from the sums of all columns.
  void find_lse_remainders(Tile& tile, std::int64_t unit, const Schedule& schedule);
  /// Backward: adds the partial dk and dv that the tile received after a phase.
  void add_incoming(Tile& tile, const Schedule& schedule, std::int64_t phase);
  /// Rows whose results are complete, to their homes.
  void finish_rows(Tile& tile, std::int64_t unit, const Schedule& schedule);
  void finish_keys(Tile& tile);
  /// Joins partial results of a grid row.
  void combine(Tile& tile);

  /// Where chunk number `visit` of a phase lies: k, then v.
  std::int64_t chunk_at(const Tile& tile, std::int64_t phase, std::int64_t visit) const {
    return tile.keys.chunks + slot(phase, visit) * tile.keys.chunk_bytes;
  }
  std::int64_t partial_at(const Tile& tile, std::int64_t phase, std::int64_t visit) const {
    return tile.keys.partials + slot(phase, visit) * tile.keys.partial_bytes;
  }
  /// Backward: the sums of P of a grid column.
  static double* sums_of(const Tile& tile, std::int64_t column);
  /// Where the bias of an item and a visit lies, and the length of its lines.
  std::int64_t bias_at(const Tile& tile, std::int64_t visit, std::int64_t item) const {
    return tile.keys.bias + (visit * tile.sizes.items + item) * tile.sizes.chunk_rows * bias_line(tile) * 4;
  }
  static std::int64_t bias_line(const Tile& tile) { return line_of(tile.sizes.key_chunk_rows); }

 private:
  struct Visit;
  struct Step;
  std::int64_t slot(std::int64_t phase, std::int64_t visit) const {
    return (call_.machine.overlap ? phase % 2 : 0) * mapping_.in_flight + visit;
  }
  void step(Tile& tile, const Visit& visit, const Step& step);
  void forward_step(Tile& tile, const Visit& visit, const Step& step, const StepShape& shape);
  void sum_step(Tile& tile, const Visit& visit, const Step& step, const StepShape& shape);
  void backward_step(Tile& tile, const Visit& visit, const Step& step, const StepShape& shape);
  void add_product(const StepShape& shape, bool non_finite, bool of_keys, const float* a, const float* b,
                   std::int64_t line, float* c);
  void scores(Tile& tile, const Visit& visit, const Step& step, const StepShape& shape, float* slopes);
  bool load_rows(const Tile& tile, std::int64_t from, std::int64_t rows, std::int64_t channels, std::int64_t line,
                 float* to) const;
  const float* transposed(const float* rows, std::int64_t line, std::int64_t keys, std::int64_t channels, Buffer& to);
  void find_words(const MaskGroup& mask, Range rows, Range keys, std::int64_t word_line);
  void all_words(const StepShape& shape);
  void find_coordinates(const MaskGroup& mask, Range rows, Range keys, std::int64_t line);
  bool sees_a_key(const MaskGroup& mask, std::int64_t position) const;
  bool half() const { return call_.element == 2; }

  const Call& call_;
  const Mapping& mapping_;
  Cost cost_;
  Steps steps_;
  Buffer k_, v_, kt_, vt_, q_, dout_;
  Buffer clean_;
  std::vector<std::int64_t> bad_;
  std::vector<std::uint64_t> words_;
  std::vector<float> query_coordinates_, key_coordinates_, lse_remainders_;
};

}  // namespace anyflash::simulator
