// Masks as words: a bit for each of 64 keys that a query sees.
#pragma once

#include "cuda/tile/register_tile.cuh"

namespace anyflash::cuda {

/// Hidden scores become -inf. word(r, cell): the row's word of keys 64 cell .. 64 cell + 63 of the tile.
template <int kCols, class Word>
__device__ __forceinline__ void apply_mask(AccumulatorTile<kCols>& s, const Word& word) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int cell = 0; cell < (kCols + 63) / 64; ++cell) {
      const std::uint64_t bits = word(r, cell) >> 2 * (lane_number() % 4);
      const auto low = static_cast<std::uint32_t>(bits), high = static_cast<std::uint32_t>(bits >> 32);
#pragma unroll
      for (int n = 16 * cell; n < 16 * cell + 16; ++n) {
        if (n >= AccumulatorTile<kCols>::kPerRow) continue;
        const int bit = n / 2 % 4 * 8 + n % 2;
        if (!((n % 16 < 8 ? low : high) >> bit & 1)) s.at(r, n) = -__builtin_huge_valf();
      }
    }
}

}  // namespace anyflash::cuda
