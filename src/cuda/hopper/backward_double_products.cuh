// Products of float64 from swizzled tiles, for the backward kernels of Hopper, and what is done between them.
//
// Tiles lie as the copy engine swizzles them: panels of 16 channels, a row of 128 bytes each, in which 16 bytes at
// place n are at n ^ row % 8. Loads spread over all banks, along rows as along columns, if fragments count each 8 rows
// in the order of row_in(). Fragments are those of mma.m16n8k16 (common/instructions.cuh): x[j][r][e] is number e of
// row lane / 4 + 8r and of the j-th 8 columns.
//
// A warp has 16 of 64 keys. Products of a tile of 32 queries, which comes in halves, have keys for rows; columns are
// queries, or channels, of which two tiles of 8 columns take turns: that way a lane loads two neighbours at once.
//
// E is float64, a parameter lest other GPUs' code be made of it.
#pragma once

#include "cuda/common/exponential.cuh"
#include "cuda/hopper/barriers.cuh"
#include "cuda/hopper/tiles.cuh"
#include "cuda/portable/backward_shared.cuh"

namespace anyflash::cuda {

/// Rows that the fragments call 0 to 7, of eight.
__device__ __forceinline__ constexpr unsigned row_in(unsigned n) {
  return (n >> 1 & 1) << 2 | ((n ^ n >> 2) & 1) << 1 | n >> 2;
}
/// The row or query, of eight, that column e of this lane is.
__device__ __forceinline__ unsigned column_in(unsigned e) { return row_in(2 * (lane_number() % 4) + e); }
/// This lane's first key of 64; the second is 8 behind it.
__device__ __forceinline__ unsigned key_row() { return threadIdx.x / 32 % 4 * 16 + row_in(lane_number() / 4); }

template <class E, int kTiles>
__device__ __forceinline__ void clear_fragments(E (&x)[kTiles][2][2]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) x[j][0][0] = x[j][0][1] = x[j][1][0] = x[j][1][1] = 0;
}

template <class E>
__device__ __forceinline__ E number_at(const E* tile, unsigned bytes) {
  return *reinterpret_cast<const E*>(reinterpret_cast<const char*>(tile) + bytes);
}
template <class E>
__device__ __forceinline__ double2 pair_at(const E* tile, unsigned bytes) {
  return *reinterpret_cast<const double2*>(reinterpret_cast<const char*>(tile) + bytes);
}

/// Rows of K or V times rows of Q or dO, as in the forward pass and in DoubleProducts, to the bit. first, second:
/// halves of the queries' tile.
template <int kPanels, class E>
__device__ __forceinline__ void row_products(E (&x)[4][2][2], const E* key_tile, const E* first, const E* second) {
  const unsigned lane = lane_number(), r = row_in(lane / 4), t = lane % 4;
  const unsigned in_row = (t / 2 ^ r) * 16 + t % 2 * 8;  // channel t; t + 4n lies at in_row ^ 32n
  unsigned at[4];
#pragma unroll
  for (int n = 0; n < 4; ++n) at[n] = r * 128 + (in_row ^ 32 * n);
  const unsigned first_row = threadIdx.x / 32 % 4 * 16 * 128;
  clear_fragments(x);
  constexpr int kUnrolled = kPanels <= 4 ? kPanels : 1;  // registers for operands that come early are short
#pragma unroll kUnrolled
  for (int panel = 0; panel < kPanels; ++panel) {
    E a[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) a[n] = number_at(key_tile, first_row + at[n / 2] + n % 2 * 1024 + panel * 64 * 128);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      E b[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) b[n] = number_at(j < 2 ? first : second, at[n] + j % 2 * 1024 + panel * 16 * 128);
      multiply_64(x[j][0], x[j][1], a, b);
    }
  }
}

/// Where a lane finds two neighbouring columns of the rows that are its terms of a sum, the first 8.
struct ColumnPlaces {
  unsigned at[2];
  __device__ __forceinline__ ColumnPlaces() {
#pragma unroll
    for (unsigned e = 0; e < 2; ++e) at[e] = column_in(e) * 128 + (lane_number() / 4 ^ column_in(e)) * 16;
  }
};

/// sum += weights times 16 rows of Q or dO. tile: the first of the two tiles of weights.
template <int kPanels, class E>
__device__ __forceinline__ void column_products(E (&sum)[2 * kPanels][2][2], const E (&x)[4][2][2], int tile,
                                                const E* rows) {
  const ColumnPlaces places;
  E a[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) a[n] = x[tile + n / 4][n % 2][n / 2 % 2];
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    E b[2][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const auto pair = pair_at(rows, places.at[n % 2] + n / 2 * 1024 + panel * 16 * 128);
      b[0][n] = pair.x, b[1][n] = pair.y;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) multiply_64(sum[2 * panel + i][0], sum[2 * panel + i][1], a, b[i]);
  }
}

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

/// Products become P = exp(S - lse - rest).
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
    // What is above 0 is so by a rounding at most, which may be much. A NaN stays one.
    if (static_cast<unsigned>(__double2hiint(x)) <= 0x7ff00000u) x = 0;
    x = exponential(x);
  }
}

/// P of hidden pairs becomes 0. words: of 64 keys.
template <class E>
__device__ __forceinline__ void hide_pairs(E (&p)[4][2][2], const std::uint32_t* words) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto word = words[key_row() + 8 * r];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const auto seen = word >> column_in(e);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (!(seen >> 8 * j & 1)) p[j][r][e] = 0;
    }
  }
}

/// dP becomes dS = P (dP - delta + dlse). The larger difference comes first: where dP and delta cancel, dlse is what is
/// left.
template <class E>
__device__ __forceinline__ void score_gradients(E (&x)[4][2][2], const E (&p)[4][2][2], const OfQueries<E>& delta,
                                                const OfQueries<E>& dlse) {
  delta.add_to(x, -1);
  if (dlse.given()) dlse.add_to(x, 1);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i / 4][i / 2 % 2][i % 2] *= p[i / 4][i / 2 % 2][i % 2];
}

/// A tile of P^T or dS^T in shared memory is two panels of 16 queries, rows and columns as the fragments count them:
/// where 16 bytes n of a panel's row are in the row.
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

/// dS times the rows of K of 64 keys, added to the sums of dQ: a part of a tile's, of 16 queries and 32 channels.
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
/// The row of a tile's 32 queries that row lane / 4 + 8r of such a part is.
__device__ __forceinline__ unsigned query_row(unsigned part, unsigned r) {
  const unsigned n = lane_number() / 4 * 2 + r;
  return part % 2 * 16 + n / 8 * 8 + row_in(n % 8);
}

/// A lane's two rows of gradients, row[0] and row[1] of a box, from a channel on. Sets `careful` if one is not finite.
template <int kTiles>
__device__ __forceinline__ void store_double_rows(const double (&x)[kTiles][2][2], const Rows& rows, double* data,
                                                  int first_channel, int channels, const rules::Box& box,
                                                  rules::Int3 size, const int (&row)[2], double factor,
                                                  std::int32_t* careful) {
  double zero = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) zero += 0 * x[j][r][0] + 0 * x[j][r][1];
    const auto c = entry_of(box, row[r]);
    if (!rules::inside(c, size)) continue;
    double* const to = data + c[0] * rows.sequence[0] + c[1] * rows.sequence[1] + c[2] * rows.sequence[2];
#pragma unroll
    for (int j = 0; j < kTiles; j += 2)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int channel = first_channel + 8 * j + 4 * static_cast<int>(lane_number() % 4) + 2 * e;
        const double a = x[j][r][e] * factor, b = x[j + 1][r][e] * factor;
        if (rows.vectors && channel + 1 < channels) {
          *reinterpret_cast<double2*>(to + channel) = make_double2(a, b);
        } else {
          if (channel < channels) to[channel * rows.channel] = a;
          if (channel + 1 < channels) to[(channel + 1) * rows.channel] = b;
        }
      }
  }
  if (zero != zero) *careful = 1;
}

}  // namespace anyflash::cuda
