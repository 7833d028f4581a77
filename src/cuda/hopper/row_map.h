// What a loading thread knows of a tensor's rows and of blocks.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "rules/box.h"

namespace anyflash::cuda {

/// Made by hopper/maps.h.
struct RowMap {
  CUtensorMap map;
  std::int32_t heads;  ///< above 0: heads and batch are one axis, since the sequence has three
};

/// A sequence cut into blocks of 64.
struct Cut {
  rules::Grid grid;
  std::int32_t chunks[3], blocks;  ///< of the grid
  bool plain;                      ///< blocks are plain rows: of a sequence of one dimension, without a step
};

inline Cut cut_of(const rules::Grid& grid, bool plain) {
  return {grid, {grid.chunks(0), grid.chunks(1), grid.chunks(2)}, static_cast<std::int32_t>(grid.count()), plain};
}

}  // namespace anyflash::cuda
