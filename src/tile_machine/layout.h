// Where data lies in a tile's memory. The planner lays everything out without memory, to count bytes; the executor lays
// the same out in its arenas.
//
//   homes     slices of the call's tensors: of all waves, or of one where the tensors are in a shared memory
//   wave      what a unit keeps through its phases: gathered queries, accumulators
//   keys      key chunks in flight, partial gradients, scores; freed before the reduction
//   reduction partial rows of queries that other tiles send
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tile_machine/schedule.h"

namespace anyflash::simulator {

constexpr std::int64_t line_bytes = 64;  // every part begins on a multiple

/// Counts bytes.
class Bytes {
 public:
  explicit Bytes(std::int64_t used = 0) : used_(used) {}
  std::int64_t take(std::int64_t bytes) {
    const auto at = used_;
    used_ += (bytes + line_bytes - 1) / line_bytes * line_bytes;
    return at;
  }
  std::int64_t used() const { return used_; }

 private:
  std::int64_t used_;
};

/// Slices of the tensors. Offsets in bytes; -1: there is none.
struct Homes {
  std::int64_t query_rows = 0, key_rows = 0;
  std::int64_t q = -1, out = -1, dout = -1, dq = -1, k = -1, v = -1, dk = -1, dv = -1;
  std::int64_t statistics = -1;  ///< forward: lse, row_max, row_sum; backward: lse, delta, dlse
};
struct WavePart {
  std::int64_t q = -1, dout = -1, statistics = -1;  ///< of all items; the homes, where those are whole
  std::int64_t accumulators = -1;                   ///< (rows, line): out, or dq
  std::int64_t row_max = -1, row_sum = -1;          ///< forward
  std::int64_t dk = -1, dv = -1;                    ///< (home key rows, line)
  std::int64_t sums = -1, lse_remainders = -1;      ///< (rows): of P in float64, and what lse lost
};
struct KeysPart {
  std::int64_t chunks = -1, chunk_bytes = 0;      ///< a slot each: k, then v
  std::int64_t partials = -1, partial_bytes = 0;  ///< a slot each: dk, then dv
  std::int64_t incoming = -1;                     ///< partial dk and dv of other tiles
  std::int64_t scores = -1, dscores = -1, slopes = -1, bias = -1;
};
/// The sizes that a unit's tile is laid out by.
struct TileSizes {
  std::int64_t query_rows, items;           ///< of its grid row
  std::int64_t home_rows, home_keys;        ///< slices at home
  std::int64_t chunk_rows, key_chunk_rows;  ///< of the largest chunks
  std::int64_t step_rows;                   ///< of the largest step
  std::int64_t incoming_keys;               ///< backward: rows of partial dk and dv that it receives in one phase
};

/// How many keys of a chunk live in which grid row: Call::key_home, for all chunks at once.
class KeyHomes {
 public:
  KeyHomes(const Call& call, const Mapping& mapping) : rows_(mapping.rows) {
    for (std::int64_t chunk = 0; chunk < mapping.key_chunks; ++chunk) {
      const auto size = call.key_chunk(mapping, chunk).size();
      chunks_.push_back({size / rows_, size % rows_, call.first_row(mapping, chunk)});
    }
  }
  std::int64_t of(std::int64_t chunk, std::int64_t row) const {
    const auto& [each, more, first] = chunks_[chunk];
    return each + ((row >= first ? row - first : row - first + rows_) < more);
  }
  /// Adds the keys of a chunk, `times` times, to numbers of all rows, each stored as what it has more than the row before.
  void add(std::int64_t chunk, std::int64_t times, std::vector<std::int64_t>& steps) const {
    const auto& [each, more, first] = chunks_[chunk];
    const auto end = first + more;
    steps[0] += times * (each + (end > rows_));
    steps[first] += times;
    steps[end > rows_ ? end - rows_ : end] -= times;
  }

 private:
  struct Home {
    std::int64_t each, more, first;  // so many in each row, and one more in `more` rows from `first` on, cyclically
  };
  std::int64_t rows_;
  std::vector<Home> chunks_;
};

/// Backward: rows of partial dk and dv that each tile receives after a phase, from the others of its column (phases,
/// tiles). Empty phases: none are sent.
using IncomingRows = std::vector<std::vector<std::int64_t>>;
IncomingRows incoming_rows(const Call& call, const Mapping& mapping, const Schedule& schedule);
/// The sizes of all tiles of a unit.
std::vector<TileSizes> sizes_of(const Call& call, const Mapping& mapping, const Schedule& schedule,
                                const IncomingRows& incoming);

/// The sizes if all tiles were alike. step_rows: as many as are worthwhile and fit, but those of a chunk at least.
TileSizes typical_sizes(const Call& call, const Mapping& mapping);
/// Bytes of a tile of these sizes.
std::int64_t typical_bytes(const Call& call, const Mapping& mapping, const TileSizes& sizes);
/// The most keys that a tile is home to, and backward the most rows of partial dk and dv that it receives in one phase,
/// whatever the masks hide. The mapping is staggered.
struct MostKeys {
  std::int64_t home = 0, incoming = 0;
};
MostKeys most_keys(const Call& call, const Mapping& mapping);
/// Bytes that no tile exceeds, whatever the masks hide. The mapping is staggered, with steps of one query chunk.
std::int64_t largest_bytes(const Call& call, const Mapping& mapping, const MostKeys& keys);

template <typename Memory>
Homes lay_homes(Memory& memory, const Call& call, const TileSizes& sizes) {
  const auto queries = sizes.home_rows, keys = sizes.home_keys, e = call.element;
  Homes homes;
  homes.query_rows = queries, homes.key_rows = keys;
  homes.q = memory.take(queries * call.d_qk * e);
  homes.out = memory.take(queries * call.d_v * e);
  homes.k = memory.take(keys * call.d_qk * e);
  homes.v = memory.take(keys * call.d_v * e);
  homes.statistics = memory.take(queries * call.statistics * 4);
  if (!call.backward) return homes;
  homes.dout = memory.take(queries * call.d_v * e);
  homes.dq = memory.take(queries * call.d_qk * e);
  homes.dk = memory.take(keys * call.d_qk * e);
  homes.dv = memory.take(keys * call.d_v * e);
  return homes;
}

template <typename Memory>
WavePart lay_wave(Memory& memory, const Call& call, const Mapping& mapping, const TileSizes& sizes,
                  const Homes& homes) {
  WavePart wave;
  const auto rows = sizes.query_rows, keys = sizes.home_keys;
  if (mapping.columns > 1) {
    wave.q = memory.take(rows * call.d_qk * call.element);
    if (call.backward) wave.dout = memory.take(rows * call.d_v * call.element);
    if (call.backward) wave.statistics = memory.take(rows * call.statistics * 4);
  } else {
    wave.q = homes.q, wave.dout = homes.dout, wave.statistics = homes.statistics;
  }
  wave.accumulators = memory.take(rows * (call.backward ? call.line_qk : call.line_v) * 4);
  if (!call.backward) {
    wave.row_max = memory.take(rows * 4);
    wave.row_sum = memory.take(rows * 4);
  } else {
    wave.dk = memory.take(keys * call.line_qk * 4);
    wave.dv = memory.take(keys * call.line_v * 4);
    if (call.lse_remainders) wave.sums = memory.take(rows * mapping.columns * 8);  // of all columns, in the end
    if (call.lse_remainders) wave.lse_remainders = memory.take(rows * 4);
  }
  return wave;
}

template <typename Memory>
KeysPart lay_keys(Memory& memory, const Call& call, const Mapping& mapping, const TileSizes& sizes) {
  KeysPart part;
  const std::int64_t buffers = call.machine.overlap ? 2 : 1;
  if (mapping.rows > 1) {
    part.chunk_bytes = sizes.key_chunk_rows * call.key_row_bytes();
    part.chunks = memory.take(buffers * mapping.in_flight * part.chunk_bytes);
    if (call.backward) {
      part.partial_bytes = sizes.key_chunk_rows * (call.line_qk + call.line_v) * 4;
      part.partials = memory.take(buffers * mapping.in_flight * part.partial_bytes);
      part.incoming = memory.take(buffers * sizes.incoming_keys * call.partial_key_bytes());
    }
  }
  const auto matrix = sizes.step_rows * line_of(sizes.key_chunk_rows) * 4;
  part.scores = memory.take(matrix);
  if (call.backward) part.dscores = memory.take(matrix);
  if (call.backward && call.problem.softcap > 0) part.slopes = memory.take(matrix);
  if (call.problem.bias.given())
    part.bias = memory.take(sizes.items * mapping.in_flight * sizes.chunk_rows * line_of(sizes.key_chunk_rows) * 4 +
                            line_bytes);
  return part;
}

/// Partial results of the other tiles of a grid row.
template <typename Memory>
std::int64_t lay_reduction(Memory& memory, const Call& call, const Mapping& mapping, const TileSizes& sizes) {
  return memory.take((mapping.columns - 1) * sizes.home_rows * call.partial_query_bytes());
}

}  // namespace anyflash::simulator
