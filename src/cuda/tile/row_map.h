// What a producer needs to know of a tensor's rows and of blocks.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "rules/box.h"

namespace anyflash::cuda {

/// Made by hopper/maps.h.
struct RowMap {
  CUtensorMap map;
  std::int32_t heads;     ///< above 0: heads and batch share one axis, since the sequence has three dimensions
  std::int32_t log_step;  ///< above 0: axis 1 counts steps of this power of two along the sequence, axis 2 the rest
};

/// Divides numbers below 2^31 by a divisor known in advance.
struct Divider {
  std::uint32_t divisor = 1, factor = 0;
  int shift = 0;

  Divider() = default;
  explicit Divider(std::uint32_t d) : divisor(d > 0 ? d : 1) {
    d = divisor;
    while ((std::uint64_t{1} << shift) < d) ++shift;
    factor = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift)) + d - 1) / d);
  }
#if defined(__CUDACC__)
  __device__ __forceinline__ std::uint32_t quotient(std::uint32_t n) const {
    return divisor == 1 ? n : __umulhi(n, factor) >> (shift - 1);
  }
#endif
};

/// A sequence divided into blocks of 64.
struct Cut {
  rules::Grid grid;
  Divider by_blocks[3], by_chunks[3];  ///< by the grid's blocks and chunks in each dimension
  std::int32_t blocks;                 ///< of the grid
  bool plain;                          ///< blocks' rows are consecutive: one dimension, without a step
};

inline Cut cut_of(const rules::Grid& grid, bool plain) {
  Cut cut{grid, {}, {}, static_cast<std::int32_t>(grid.count()), plain};
  for (int i = 0; i < 3; ++i) {
    cut.by_chunks[i] = Divider(static_cast<std::uint32_t>(grid.chunks(i)));
    cut.by_blocks[i] = Divider(static_cast<std::uint32_t>(grid.chunks(i) * grid.step[i]));
  }
  return cut;
}

}  // namespace anyflash::cuda
