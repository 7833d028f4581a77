// Products of 64 x 64 tiles for split-bfloat16 float32 (common/split_bf16.cuh): six bfloat16 products for one, or three.
// Sums leave the tensor cores after a tile, in two parts that are added in ordinary float32.
#pragma once

#include "cuda/common/split_bf16.cuh"
#include "cuda/tile/accumulators.cuh"

namespace anyflash::cuda {

/// A tile in shared memory: one bfloat16 term after the other, in swizzled rows of 64 numbers.
template <int bf16_terms>
struct alignas(1024) SplitTile {
  static constexpr int kNumbers = 64 * 64, kTermBytes = kNumbers * 2, kBytes = bf16_terms * kTermBytes;
  __nv_bfloat16 numbers[bf16_terms * kNumbers];

  /// The offset of term n in descriptors.
  __device__ __forceinline__ static constexpr std::uint32_t term(int n) { return n * (kTermBytes / 16); }
};

/// The bfloat16 terms of a tile as an operand from registers.
template <int bf16_terms>
using SplitOperand = std::uint32_t[bf16_terms][4][4];

struct SplitSums {
  using Tile = float[8][4];
  Tile high, small;
};

/// Issues all products of bfloat16 terms over 64 numbers, 16 per step. multiply_terms(sum, first, second, m, adds)
/// multiplies two terms in step m, and adds the result to the sum or replaces it.
template <int bf16_terms, class MultiplyTerms>
__device__ __forceinline__ void issue_products(SplitSums& sums, const MultiplyTerms& multiply_terms) {
  static_assert(kSplitChain == 4 * 16 && kHighChunks <= 4, "four steps are one sum on the tensor cores");
  constexpr int kFirstSmall = first_small(bf16_terms);
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int n = kFirstSmall; n < kSmallProducts; ++n)
      multiply_terms(sums.small, first_term(n), second_term(n), m, m > 0 || n > kFirstSmall);
    if (m < kHighChunks) multiply_terms(sums.high, 0, 0, m, m > 0);
  }
#pragma unroll
  for (int m = kHighChunks; m < 4; ++m) multiply_terms(sums.small, 0, 0, m, true);
}

template <bool kAdds = false>
__device__ __forceinline__ void join(SplitSums::Tile& to, SplitSums& sums) {
  keep(sums.high), keep(sums.small);
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float sum = sums.high[j][e] + sums.small[j][e];
      to[j][e] = kAdds ? to[j][e] + sum : sum;
    }
}
__device__ __forceinline__ void add(SplitSums::Tile& to, SplitSums& sums) { join<true>(to, sums); }

/// A tile, multiplied by `size`, as an operand.
template <int bf16_terms>
__device__ __forceinline__ void split_operand(std::uint32_t (&to)[bf16_terms][4][4], const SplitSums::Tile& x,
                                              float size) {
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* const pair = &x[2 * m + n / 2][n % 2 * 2];
      split<bf16_terms>(pair[0] * size, pair[1] * size, [&](int term) -> std::uint32_t& { return to[term][m][n]; });
    }
}

template <int bf16_terms>
__device__ __forceinline__ void store_operand(SplitTile<bf16_terms>& to, const std::uint32_t (&x)[bf16_terms][4][4]) {
  const unsigned row = threadIdx.x / 32 % 4 * 16 + lane_number() % 16, half = lane_number() / 16;
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int n = 0; n < bf16_terms; ++n)
      store_matrices(to.numbers + n * SplitTile<bf16_terms>::kNumbers + row * 64 + ((2 * m + half) ^ row % 8) * 8,
                     x[n][m]);
}

}  // namespace anyflash::cuda
