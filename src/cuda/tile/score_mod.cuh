// What happens to scores between Q K^T and the mask.
#pragma once

#include "cuda/tile/register_tile.cuh"

namespace anyflash::cuda {

/// s = scale * s, then cap * tanh(s / cap) if cap > 0.
template <int kCols>
__device__ __forceinline__ void apply_score_mod(AccumulatorTile<kCols>& s, float scale, float cap, float cap_inverse) {
#pragma unroll
  for (int j = 0; j < AccumulatorTile<kCols>::kGroups; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) s.x[j][e] *= scale;
  if (cap > 0) {
#pragma unroll
    for (int j = 0; j < AccumulatorTile<kCols>::kGroups; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s.x[j][e] = cap * tanhf(s.x[j][e] * cap_inverse);
  }
}

}  // namespace anyflash::cuda
