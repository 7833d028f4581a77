// The steps between products (double_products.cuh) in Hopper's float64 backward kernels. Own rows are keys, those of
// the other side queries.
//
// E is float64. It is a parameter so that other GPUs' builds compile no code for it.
#pragma once

#include "cuda/common/exponential.cuh"
#include "cuda/hopper/double_products.cuh"
#include "cuda/portable/backward_shared.cuh"
#include "cuda/tile/runs.cuh"

namespace anyflash::cuda {

/// A number of each query of a tile, by halves; first null: 0.
template <class E>
struct OfQueries {
  const E *first, *second;
  __device__ __forceinline__ bool given() const { return first != nullptr; }
  __device__ __forceinline__ void add_to(E (&x)[4][2][2], E sign) const {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const E y = (j < 2 ? first : second)[j % 2 * 8 + column_in(e)];
#pragma unroll
        for (int r = 0; r < 2; ++r) x[j][r][e] = sign < 0 ? x[j][r][e] - y : x[j][r][e] + y;
      }
  }
};

/// Turns products into P = exp(S - lse - rest).
template <class E>
__device__ __forceinline__ void weigh_scores(E (&s)[4][2][2], E scale, const OfQueries<E>& lse,
                                             const OfQueries<E>& rest) {
  const Exponential exponential;
#pragma unroll
  for (int i = 0; i < 16; ++i) s[i / 4][i / 2 % 2][i % 2] = rounded_product(s[i / 4][i / 2 % 2][i % 2], scale);
  lse.add_to(s, -1);
  if (rest.given()) rest.add_to(s, -1);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    E& x = s[i / 4][i / 2 % 2][i % 2];
    // A positive exponent comes only from rounding, which can be a lot: P is then 1. A NaN stays one.
    if (static_cast<unsigned>(__double2hiint(x)) <= 0x7ff00000u) x = 0;
    x = exponential(x);
  }
}

/// P of hidden pairs becomes 0. words: of 64 keys.
template <class E>
__device__ __forceinline__ void hide_pairs(E (&p)[4][2][2], const std::uint32_t* words) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto word = words[own_row() + 8 * r];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const auto seen = word >> column_in(e);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (!(seen >> 8 * j & 1)) p[j][r][e] = 0;
    }
  }
}

/// Turns dP into dS = P (dP - delta + dlse). The larger difference comes first: where dP and delta cancel, dlse
/// remains.
template <class E>
__device__ __forceinline__ void score_gradients(E (&x)[4][2][2], const E (&p)[4][2][2], const OfQueries<E>& delta,
                                                const OfQueries<E>& dlse) {
  delta.add_to(x, -1);
  if (dlse.given()) dlse.add_to(x, 1);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i / 4][i / 2 % 2][i % 2] *= p[i / 4][i / 2 % 2][i % 2];
}

/// A tile of P^T or dS^T in shared memory has two panels of 16 queries, with rows and columns in the fragments' order.
/// This is where 16-byte chunk n of a panel's row is.
__device__ __forceinline__ unsigned score_place(unsigned n, unsigned r) {
  return (n ^ (r & 2) ^ ((r ^ r >> 2) & 1) << 2) * 16;
}
/// A lane's two numbers of tile j and row lane / 4 + 8r of its warp's.
template <class E>
__device__ __forceinline__ double2* scores_at(E* scores, int j, int r) {
  const unsigned lane = lane_number();
  return reinterpret_cast<double2*>(reinterpret_cast<char*>(scores) + (threadIdx.x / 32 % 4 * 16 + lane / 4) * 128 +
                                    j / 2 * 64 * 128 + r * 1024 + score_place(j % 2 * 4 + lane % 4, lane / 4));
}
template <class E>
__device__ __forceinline__ void store_scores(E* scores, const E (&x)[4][2][2]) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) *scores_at(scores, j, r) = make_double2(x[j][r][0], x[j][r][1]);
}
template <class E>
__device__ __forceinline__ void read_scores(E (&x)[4][2][2], E* scores) {
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto pair = *scores_at(scores, j, r);
      x[j][r][0] = pair.x, x[j][r][1] = pair.y;
    }
}

/// Adds dS times K of 64 keys to the sums of dQ, for a part of a tile: 16 queries and 32 channels.
template <class E>
__device__ __forceinline__ void add_query_gradient(E* sums, const E* scores, const E* rows, unsigned part) {
  const unsigned lane = lane_number();
  scores += part % 2 * 64 * 16, rows += part / 2 * 2 * 64 * 16;
  const ColumnPlaces places;
  unsigned scores_at[2];
#pragma unroll
  for (unsigned e = 0; e < 2; ++e) {
    const unsigned r = 2 * (lane % 4) + e;
    scores_at[e] = r * 128 + score_place(lane / 4, r);
  }
  E sum[4][2][2];
  clear_fragments(sum);
#pragma unroll
  for (int m = 0; m < 8; m += 2) {
    E a[8];  // its rows g and g + 8 are queries 2g and 2g + 1 of the 16, which are neighbours
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const auto pair = pair_at(scores, scores_at[n % 2] + (m + n / 2) * 1024);
      a[2 * n] = pair.x, a[2 * n + 1] = pair.y;
    }
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      E b[2][4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const auto pair = pair_at(rows, places.at[n % 2] + (m + n / 2) * 1024 + panel * 64 * 128);
        b[0][n] = pair.x, b[1][n] = pair.y;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) multiply_64(sum[2 * panel + i][0], sum[2 * panel + i][1], a, b[i]);
    }
  }
  sums += part * 512 + lane;
#pragma unroll
  for (int n = 0; n < 16; ++n) atomicAdd(sums + n * 32, sum[n / 4][n / 2 % 2][n % 2]);
}
/// The query, of a tile's 32, in row lane / 4 + 8r of such a part.
__device__ __forceinline__ unsigned query_row(unsigned part, unsigned r) {
  const unsigned n = lane_number() / 4 * 2 + r;
  return part % 2 * 16 + n / 8 * 8 + row_in(n % 8);
}

}  // namespace anyflash::cuda
