// A tile: its memory, and what it has done in the current phase.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hwy/aligned_allocator.h"
#include "tile_machine/layout.h"

namespace anyflash::simulator {

/// A tile's memory, of exactly its size. It is taken from below and given back from above. The operating system provides
/// only the pages that are used.
class Arena {
 public:
  Arena(std::int64_t capacity, std::int64_t tile)
      : memory_(hwy::AllocateAligned<char>(std::size_t(std::max<std::int64_t>(capacity, 1)))),
        capacity_(capacity),
        tile_(tile) {
    if (!memory_) throw Error(Error::Kind::memory, "tile machine: not enough memory for its tiles");
  }

  /// The offset of `bytes` more bytes. Throws Error if the tile does not have them.
  std::int64_t take(std::int64_t bytes) {
    const auto at = bytes_.take(bytes);
    if (bytes_.used() > capacity_) {
      throw Error(Error::Kind::memory, "tile machine: tile " + std::to_string(tile_) + ": " +
                                           std::to_string(bytes_.used()) + " bytes live, expected at most " +
                                           std::to_string(capacity_));
    }
    return at;
  }
  std::int64_t live() const { return bytes_.used(); }
  /// Gives back all that was taken since live() was `live`.
  void release(std::int64_t live) { bytes_ = Bytes(live); }

  char* at(std::int64_t offset) const { return memory_.get() + offset; }
  float* floats(std::int64_t offset) const { return reinterpret_cast<float*>(at(offset)); }

 private:
  hwy::AlignedFreeUniquePtr<char[]> memory_;
  std::int64_t capacity_, tile_;
  Bytes bytes_;
};

/// A rectangle of dS that the host adds to dbias.
struct BiasPart {
  std::int64_t item;
  Range rows, keys;
  std::int64_t offset, line;  ///< in the arena, of its first number; numbers of a line
};

struct Tile {
  Tile(std::int64_t capacity, std::int64_t number) : arena(capacity, number), number(number) {}

  Arena arena;
  std::int64_t number;  ///< on the machine
  std::int64_t row = 0, column = 0;
  TileSizes sizes{};
  std::vector<Homes> homes;  ///< by wave
  Homes home;                ///< of the current wave
  WavePart wave;
  KeysPart keys;
  std::int64_t reduction = -1;
  std::vector<std::int64_t> item_start;        ///< of its grid row's items, among all rows
  std::vector<std::int64_t> home_item_start;   ///< the same among the rows at home
  std::vector<std::int64_t> home_in_item;      ///< where in an item the rows at home begin
  std::vector<std::int64_t> home_chunk_start;  ///< of its column's key chunks, among the keys at home
  std::vector<BiasPart> bias_parts;
  std::vector<double> dsink;  ///< of the unit's heads
  float value_scale = 1;      ///< forward: a power of two that v is multiplied by, so that sums of P V stay finite

  // Of the current phase.
  double compute = 0;
  std::int64_t received = 0, sent = 0, outside = 0, hops = 0;
  // Of the whole call.
  double pairs = 0;                   ///< visible ones
  std::vector<std::int64_t> senders;  ///< bytes received from each tile of its group, then from outside; for a trace
};

}  // namespace anyflash::simulator
