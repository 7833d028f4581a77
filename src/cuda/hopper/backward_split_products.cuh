// Tile operations of a warpgroup in Hopper's backward kernels for split-bfloat16 float32 (common/split_bf16.cuh). Products
// of 64 x 64 tiles take six bfloat16 products for one, or three. In registers rows are keys, and columns are queries or
// channels. Sums leave the tensor cores after a tile, in two parts that are added in ordinary float32.
#pragma once

#include "cuda/common/split_bf16.cuh"
#include "cuda/hopper/backward_args.h"
#include "cuda/hopper/backward_registers.cuh"
#include "cuda/tile/runs.cuh"

namespace anyflash::cuda {

/// A tile in shared memory: one bfloat16 term after the other, in swizzled rows of 64 numbers.
template <int bf16_terms>
struct alignas(1024) SplitTile {
  static constexpr int kNumbers = 64 * 64, kTermBytes = kNumbers * 2, kBytes = bf16_terms * kTermBytes;
  __nv_bfloat16 numbers[bf16_terms * kNumbers];
};

/// bf16_terms: bfloat16 terms of a number.
template <int bf16_terms>
class SplitTiles {
 protected:
  using SplitTile = cuda::SplitTile<bf16_terms>;
  using Operand = __nv_bfloat16;
  using Tile = float[8][4];
  struct Sums {
    Tile high, small;
  };
  using Weights = std::uint32_t[bf16_terms][4][4];
  static constexpr int kFirstSmall = first_small(bf16_terms);

  /// This lane's first row of a tile; the second is 8 rows further.
  __device__ __forceinline__ static unsigned row() { return threadIdx.x / 32 % 4 * 16 + lane_number() / 4; }

  __device__ __forceinline__ static void clear(Tile& x) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[j][e] = 0;
  }

  __device__ __forceinline__ static std::uint32_t term(int n) { return n * (SplitTile::kTermBytes / 16); }

  /// Rows of K or V times rows of Q or dO: to the bit as in the forward pass, and, with three terms, as in
  /// SplitProducts.
  __device__ __forceinline__ static void row_products(Sums& sums, const SplitTile& key_tile,
                                                      const SplitTile& query_tile) {
    const auto a = describe_tile(&key_tile, 0), b = describe_tile(&query_tile, 0);
    products(sums, [&](Tile& sum, int first, int second, int m, bool adds) {
      const auto at = columns_from<64>(16 * m);
      wgmma<false, false>(sum, a + term(second) + at, b + term(first) + at, adds, Operand());
    });
  }

  /// P^T times rows of dO, or dS^T times rows of Q.
  __device__ __forceinline__ static void weighted_rows(Sums& sums, const Weights& weights, const SplitTile& rows) {
    const auto b = describe_tile(&rows, 0);
    products(sums, [&](Tile& sum, int first, int second, int m, bool adds) {
      wgmma<true>(sum, weights[first][m], b + term(second) + rows_from(16 * m), adds, Operand());
    });
  }

  /// dS^T times rows of Q; transposed, dS times rows of K.
  template <bool kTransposed>
  __device__ __forceinline__ static void tile_products(Sums& sums, const SplitTile& scores, const SplitTile& rows) {
    const auto a = describe_tile(&scores, 0), b = describe_tile(&rows, 0);
    products(sums, [&](Tile& sum, int first, int second, int m, bool adds) {
      const auto a_at = kTransposed ? rows_from(16 * m) : columns_from<64>(16 * m);
      wgmma<kTransposed, true>(sum, a + term(first) + a_at, b + term(second) + rows_from(16 * m), adds, Operand());
    });
  }

  __device__ __forceinline__ static void join(Tile& to, Sums& sums) {
    keep(sums.high), keep(sums.small);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[j][e] = sums.high[j][e] + sums.small[j][e];
  }
  __device__ __forceinline__ static void add(Tile& to, Sums& sums) {
    keep(sums.high), keep(sums.small);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[j][e] += sums.high[j][e] + sums.small[j][e];
  }

  /// Turns scores into P. rest: lse remainders of the tile's queries, null: 0. words: of its keys, null: no pair is
  /// hidden.
  __device__ __forceinline__ static void weigh(Tile& s, const float* lse, const float* rest, const Word* words,
                                               float factor) {
    const unsigned first = 2 * (lane_number() % 4);
    lse += first;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(lse + 8 * j);
      const float2 y = rest ? *reinterpret_cast<const float2*>(rest + first + 8 * j) : float2{0, 0};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float below = __fadd_rn(rounded_product(s[j][e], factor), e % 2 == 0 ? -x.x : -x.y);
        below = __fadd_rn(below, e % 2 == 0 ? -y.x : -y.y);
        asm("min.NaN.f32 %0, %0, 0f00000000;" : "+f"(below));  // positive only by rounding, which may be a lot
        s[j][e] = expf(below);
      }
    }
    if (words) hide(s, words[row()] >> first, words[row() + 8] >> first);
  }

  /// A tile, multiplied by `size`, as an operand.
  __device__ __forceinline__ static void split_operand(Weights& to, const Tile& x, float size) {
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* const pair = &x[2 * m + n / 2][n % 2 * 2];
        split<bf16_terms>(pair[0] * size, pair[1] * size, [&](int term) -> std::uint32_t& { return to[term][m][n]; });
      }
  }
  __device__ __forceinline__ static void store_operand(SplitTile& to, const Weights& x) {
    const unsigned row = threadIdx.x / 32 % 4 * 16 + lane_number() % 16, half = lane_number() / 16;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < bf16_terms; ++n)
        store_matrices(to.numbers + n * SplitTile::kNumbers + row * 64 + ((2 * m + half) ^ row % 8) * 8, x[n][m]);
  }

  /// Adds a tile to sums in global memory, in the order of the warpgroup's registers (backward_sums.cuh).
  __device__ __forceinline__ static void add_to_sums(float* to, const Tile& x) {
#pragma unroll
    for (int j = 0; j < 8; ++j) add_to_memory(to + j * 512 + threadIdx.x % 128 * 4, x[j]);
  }

  /// 64 channels, from `first` on, of a key block's rows of dK (n = 0) or dV.
  __device__ __forceinline__ static void store_gradient(const Tile& x, const GroupBackwardArgs& args, std::int32_t b,
                                                        std::int32_t key_head, std::int32_t block, int n, int first) {
    const auto& side = args.sides[keys];
    const auto& rows = side.gradients[n];
    if (!rows.data || block >= side.blocks) return;
    store_float_rows(x, rows, head_data<float>(rows, b, key_head) + first * rows.channel, args.channels[n] - first,
                     box_of(side.grid, side.plain, block), side.grid.size, static_cast<int>(row()), args.key_factors[n],
                     args.not_finite);
  }

 private:
  /// All products of bfloat16 terms over 64 numbers, 16 per step. multiply_terms(sum, first, second, m, adds)
  /// multiplies two terms in step m, and adds the result to the sum or replaces it.
  template <class MultiplyTerms>
  __device__ __forceinline__ static void products(Sums& sums, MultiplyTerms multiply_terms) {
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int n = kFirstSmall; n < kSmallProducts; ++n)
        multiply_terms(sums.small, first_term(n), second_term(n), m, m > 0 || n > kFirstSmall);
      if (m < kHighChunks) multiply_terms(sums.high, 0, 0, m, m > 0);
    }
#pragma unroll
    for (int m = kHighChunks; m < 4; ++m) multiply_terms(sums.small, 0, 0, m, true);
    wgmma_commit();
  }
};

}  // namespace anyflash::cuda
