// score_mod: changes to scores between Q K^T and the mask.
#pragma once

#include "cuda/tile/register_tile.cuh"

namespace anyflash::cuda {

/// s = scale * s, then cap * tanh(s / cap) if cap > 0: the same as ScoreTerms::finish of the portable kernels, to the
/// bit.
template <int kCols>
__device__ __forceinline__ void apply_score_mod(AccumulatorTile<kCols>& s, float scale, float cap, float cap_inverse) {
#pragma unroll
  for (int j = 0; j < AccumulatorTile<kCols>::kGroups; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) s.x[j][e] = __fmul_rn(s.x[j][e], scale);
  if (cap > 0) {
#pragma unroll
    for (int j = 0; j < AccumulatorTile<kCols>::kGroups; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s.x[j][e] = __fmul_rn(tanhf(__fmul_rn(s.x[j][e], cap_inverse)), cap);
  }
}

/// ALiBi: takes slope times the distance off. gap: the difference of coordinates of this lane's first pair, exact.
__device__ __forceinline__ void apply_alibi(AccumulatorTile<64>& s, float slope, float gap) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) s.x[j][e] = fmaf(-slope, fabsf(gap + (e / 2 * 8 - 8 * j - e % 2)), s.x[j][e]);
}

/// Adds a bias of 64 queries and 64 keys, as TMA writes it: swizzled rows of 128 bytes; float32 has two panels. type:
/// as in Numbers. row: this lane's first row of the tile; a bias of one row is row 0 for all queries.
template <int kBiasBytes>
__device__ __forceinline__ void add_bias(AccumulatorTile<64>& s, const char* tile, int type, bool one_row, int row) {
  const unsigned t = lane_number() % 4;
  const auto add = [&](const auto& read) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned own = one_row ? 0 : row + 8 * r;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 x = read(tile + own * 128, own % 8, j);
        s.x[j][2 * r] += x.x, s.x[j][2 * r + 1] += x.y;
      }
    }
  };
  const auto pair_at = [=](const char* from, unsigned swizzle, int j) { return from + (j ^ swizzle) * 16 + 4 * t; };
  if (type == 0) {
    add([&](const char* from, unsigned swizzle, int j) {
      return __half22float2(*reinterpret_cast<const __half2*>(pair_at(from, swizzle, j)));
    });
  } else if (type == 1) {
    add([&](const char* from, unsigned swizzle, int j) {
      return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(pair_at(from, swizzle, j)));
    });
  } else if constexpr (kBiasBytes == 4) {
    add([&](const char* from, unsigned swizzle, int j) {
      const unsigned chunk = (2 * (j % 4) + t / 2) ^ swizzle;
      return *reinterpret_cast<const float2*>(from + j / 4 * 8192 + chunk * 16 + t % 2 * 8);
    });
  }
}

}  // namespace anyflash::cuda
