// Where everything lives: which tile computes which queries with which keys.
//
// A unit is one key head of one batch entry, with the query heads that share it. An item is a query chunk of one of
// these heads. A unit's tiles form a grid: a row of tiles shares items, a column shares key chunks. Key chunks
// are dealt to the columns in rounds. Items are dealt to the rows so that all have about the same work. Units compute side by side
// if there are tiles for it, else in waves.
//
// A tensor's home: the rows of an item are sliced over the tiles of its grid row, those of a key chunk over the tiles of
// its column. So every tile sends and receives about the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <anyflash/tile_machine.h>

#include "plan/plan.h"
#include "tile_machine/hulls.h"

namespace anyflash::simulator {

/// Entries or rows first .. end - 1.
struct Range {
  std::int64_t first = 0, end = 0;
  std::int64_t size() const { return end - first; }
  friend bool operator==(const Range&, const Range&) = default;
};

/// Part `part` of `entries` entries cut into parts that differ by one at most.
inline Range part_of(std::int64_t entries, std::int64_t parts, std::int64_t part) {
  return {entries * part / parts, entries * (part + 1) / parts};
}

/// The same, where the parts from `first` on, cyclically, have one more.
inline Range slice_of(std::int64_t entries, std::int64_t parts, std::int64_t part, std::int64_t first) {
  const auto each = entries / parts, more = entries % parts, wrapped = std::max<std::int64_t>(first + more - parts, 0);
  const auto before = [&](std::int64_t p) {  // parts with one more below part p
    return std::min(p, wrapped) + std::clamp<std::int64_t>(p - first, 0, more - wrapped);
  };
  return {part * each + before(part), (part + 1) * each + before(part + 1)};
}

/// The length of a line of floats: whole vectors of any instruction set, and whole columns of a matrix unit.
inline std::int64_t line_of(std::int64_t numbers) { return (numbers + 15) / 16 * 16; }

struct Mapping {
  std::int64_t query_chunks = 1, key_chunks = 1;  // of one head
  std::int64_t rows = 1, columns = 1;             // tiles of a unit
  std::int64_t in_flight = 1;                     // key chunks that a tile receives in one phase, at most
  std::int64_t at_once = 1, waves = 1;            // units that compute at the same time, and how many times
  std::int64_t step_rows = 0;                     // queries of a step at most; 0: as the memory allows
  bool turns = false;                             // key chunks are dealt to the columns back and forth, not round about
  /// A key chunk's phase depends on its round and the grid row alone. Else heavy phases come first.
  bool staggered = false;

  std::int64_t tiles_each() const { return rows * columns; }
  std::int64_t rounds() const { return (key_chunks + columns - 1) / columns; }
  /// staggered: each grid row begins with another round, so few tiles send partial dk and dv of a chunk at a time.
  std::int64_t first_round(std::int64_t row) const { return row * rounds() / rows; }
  std::int64_t phase_of(std::int64_t chunk, std::int64_t row) const {
    return (chunk / columns + rounds() - first_round(row)) % rounds() / in_flight;
  }
  /// Key chunks are dealt to the columns in rounds.
  std::int64_t column_of(std::int64_t chunk) const { return turned(chunk / columns, chunk % columns); }
  /// Calls f(chunk, column) for all key chunks.
  template <typename F>
  void each_chunk(const F& f) const {
    for (std::int64_t round = 0, chunk = 0; chunk < key_chunks; ++round)
      for (std::int64_t at = 0; at < columns && chunk < key_chunks; ++at, ++chunk) f(chunk, turned(round, at));
  }
  /// Calls f(chunk) for the key chunks of a column. Number n is of round n.
  template <typename F>
  void chunks_of(std::int64_t column, const F& f) const {
    for (std::int64_t round = 0; round * columns < key_chunks; ++round) {
      const auto chunk = round * columns + turned(round, column);
      if (chunk < key_chunks) f(chunk);
    }
  }

 private:
  std::int64_t turned(std::int64_t round, std::int64_t at) const {
    return turns && round % 2 == 1 ? columns - 1 - at : at;
  }
};

class KnownWeights;

/// What planner and executor know of a call.
struct Call {
  Call(const Problem& problem, const ExecutionPlan& plan, const TileMachine& machine, const TileChoice& choice);

  const Problem& problem;
  const ExecutionPlan& plan;
  TileMachine machine;
  TileChoice choice;
  std::int64_t chunks_q, chunks_kv;  // that the caller asks for; 0: the planner chooses
  std::int64_t budget;               // the most bytes that may be live on a tile
  bool backward;
  std::int64_t element;  // bytes
  std::int64_t heads_each, units;
  std::int64_t d_qk, d_v, line_qk, line_v;
  std::int64_t statistics;  // of a row, in float32: lse or lse, row_max, row_sum; backward: lse, delta, dlse if given
  Order queries, keys;
  std::shared_ptr<KnownWeights> known_weights;  ///< of mappings looked at so far; for one thread
  std::vector<Hulls> hulls;                     ///< of the plan's masks; none if that would take long
  /// The rule shows more of the first half of the keys than of the second, or less. Then key chunks go back and forth
  /// over the columns, so that these have about the same work.
  bool lopsided = false;
  /// Backward, with an lse so large that its rounding error is one of P = exp(S - lse): P is summed first.
  bool lse_remainders = false;
  static constexpr float large_lse = 32;

  std::int64_t batch_of(std::int64_t unit) const { return unit / problem.heads_kv; }
  std::int64_t key_head_of(std::int64_t unit) const { return unit % problem.heads_kv; }
  std::int64_t head_of(std::int64_t unit, std::int64_t in_unit) const {
    return key_head_of(unit) * heads_each + in_unit;
  }
  const MaskGroup& mask(std::int64_t unit, std::int64_t in_unit) const {
    return plan.group(batch_of(unit), head_of(unit, in_unit));
  }
  const Hulls* hulls_of(const MaskGroup& mask) const {
    return hulls.empty() ? nullptr : &hulls[&mask - plan.groups.data()];
  }
  Range query_chunk(const Mapping& mapping, std::int64_t item) const {
    return part_of(queries.entries(), mapping.query_chunks, item % mapping.query_chunks);
  }
  Range key_chunk(const Mapping& mapping, std::int64_t chunk) const {
    return part_of(keys.entries(), mapping.key_chunks, chunk);
  }
  /// The slice of a key chunk whose home is in a grid row. A column deals its keys on from chunk to chunk, so that its
  /// tiles have about as many, however short the chunks are.
  Range key_home(const Mapping& mapping, std::int64_t chunk, std::int64_t row) const {
    return slice_of(key_chunk(mapping, chunk).size(), mapping.rows, row, first_row(mapping, chunk));
  }
  /// The grid row at which the column begins to deal a chunk.
  std::int64_t first_row(const Mapping& mapping, std::int64_t chunk) const {
    return chunk / mapping.columns * (keys.entries() / mapping.key_chunks) % mapping.rows;
  }
  /// Bytes of memory that tensors can have on a tile.
  std::int64_t memory() const { return std::min(budget, machine_memory()); }
  std::int64_t machine_memory() const { return machine.memory_per_tile - machine.reserved_per_tile; }
  /// The tensors are on the tiles, not in a memory that all share.
  bool resident() const { return machine.memory_bytes_per_cycle <= 0; }
  /// Bytes of a query row that the tiles of a grid row send each other, and of a key row in a column.
  std::int64_t query_row_bytes() const { return backward ? (d_qk + d_v) * element + 4 * statistics : d_qk * element; }
  std::int64_t key_row_bytes() const { return (d_qk + d_v) * element; }
  /// Bytes of a row of partial results: of queries along a grid row, of keys (backward) along a column.
  std::int64_t partial_query_bytes() const { return (backward ? d_qk : d_v + 2) * 4; }
  std::int64_t partial_key_bytes() const { return (d_qk + d_v) * 4; }
};

}  // namespace anyflash::simulator
