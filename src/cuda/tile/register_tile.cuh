// Tiles of 64 rows in a warpgroup's registers: accumulators of wgmma, and A operands made of them. A lane has two rows,
// `row` and `row + 8` of its warp's 16; a row is spread over four neighbouring lanes.
#pragma once

#include "cuda/tile/shared_tile.cuh"
#include "cuda/tile/wgmma.cuh"

namespace anyflash::cuda {

template <int kCols_>
struct AccumulatorTile {
  static constexpr int kCols = kCols_, kGroups = kCols / 8;
  float x[kGroups][4];

  __device__ __forceinline__ float& at(int row, int column) { return x[column / 2][2 * row + column % 2]; }
  static constexpr int kPerRow = 2 * kGroups;  ///< numbers that a lane has of a row

  /// NaN if a number is not finite, else `others`, which is 0 or NaN.
  __device__ __forceinline__ float nan_unless_finite(float others) const {
    float y[4] = {others};  // four short chains
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] = fmaf(0, x[j][e], y[e]);
    return y[0] + y[1] + y[2] + y[3];
  }
  /// Ties the registers to this place, so that the compiler moves no reads of them from after a wait to before it.
  __device__ __forceinline__ void fence_operand() {
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
      asm volatile("" : "+f"(x[j][0]), "+f"(x[j][1]), "+f"(x[j][2]), "+f"(x[j][3])::"memory");
  }
};

template <class E, int kCols>
struct OperandTile {
  std::uint32_t x[kCols / 16][4];

  __device__ __forceinline__ void pack(const AccumulatorTile<kCols>& from) {
#pragma unroll
    for (int m = 0; m < kCols / 16; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* const pair = &from.x[2 * m + n / 2][n % 2 * 2];
        x[m][n] = packed_pair(pair[0], pair[1], E());
      }
  }
  __device__ __forceinline__ void fence_operand() {
#pragma unroll
    for (int m = 0; m < kCols / 16; ++m)
      asm volatile("" : "+r"(x[m][0]), "+r"(x[m][1]), "+r"(x[m][2]), "+r"(x[m][3])::"memory");
  }
};

/// Issues s = a b^T, s is (64 x N), a is (64 x K), b is (N x K).
template <class E, int kN, int kK>
__device__ __forceinline__ void mma_ABt(AccumulatorTile<kN>& s, const SharedTile<E, 64, kK>& a,
                                        const SharedTile<E, kN, kK>& b) {
  using A = SharedTile<E, 64, kK>;
  using B = SharedTile<E, kN, kK>;
  const auto a_at = a.descriptor(), b_at = b.descriptor();
#pragma unroll
  for (int k = 0; k < kK; k += 16) wgmma<false, false>(s.x, a_at + A::columns(k), b_at + B::columns(k), k > 0, E());
}

/// Issues o += p b, or o = p b if not `sum`; o is (64 x N), p is (64 x K), b is (K x N).
template <class E, int kN, int kK>
__device__ __forceinline__ void mma_AB(AccumulatorTile<kN>& o, const OperandTile<E, kK>& p,
                                       const SharedTile<E, kK, kN>& b, bool sum) {
  const auto b_at = b.descriptor();
#pragma unroll
  for (int m = 0; m < kK / 16; ++m)
    wgmma<true>(o.x, p.x[m], b_at + SharedTile<E, kK, kN>::rows(16 * m), sum || m > 0, E());
}

template <int kN>
__device__ __forceinline__ void rescale_rows(AccumulatorTile<kN>& o, const float (&factor)[2]) {
#pragma unroll
  for (int j = 0; j < AccumulatorTile<kN>::kGroups; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) o.x[j][e] *= factor[e / 2];
}

}  // namespace anyflash::cuda
