// float64 products from swizzled tiles, for Hopper's forward and backward kernels.
//
// Tiles are swizzled by TMA: panels of 16 channels, rows of 128 bytes, in which 16-byte chunk n is at n ^ row % 8.
// Loads along rows and along columns have no bank conflicts if fragments take each 8 rows in the order of row_in().
// Fragments are those of mma.m16n8k16 (common/instructions.cuh): x[j][r][e] is number e of row lane / 4 + 8r and of the
// j-th 8 columns.
//
// A warp has 16 of its warpgroup's 64 own rows: keys in the backward pass, queries in the forward pass. A tile of the
// other side is 32 rows, in halves. Rows of products are own rows. Columns are rows of the other side, or channels. Two
// tiles of 8 columns interleave, so that a lane loads two neighbours at once.
//
// E is float64. It is a parameter so that other GPUs' builds compile no code for it.
#pragma once

#include "cuda/portable/rows.cuh"
#include "cuda/tile/barriers.cuh"

namespace anyflash::cuda {

/// The tile rows that the fragments number 0 to 7.
__device__ __forceinline__ constexpr unsigned row_in(unsigned n) {
  return (n >> 1 & 1) << 2 | ((n ^ n >> 2) & 1) << 1 | n >> 2;
}
/// The row of the other side, of eight, that is column e of this lane.
__device__ __forceinline__ unsigned column_in(unsigned e) { return row_in(2 * (lane_number() % 4) + e); }
/// This lane's first own row of 64; the second is 8 rows further.
__device__ __forceinline__ unsigned own_row() { return threadIdx.x / 32 % 4 * 16 + row_in(lane_number() / 4); }

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

/// The offsets in bytes of the channels of its row that a lane contributes to a product: t + 4n of a panel, where t is
/// lane % 4.
struct RowPlaces {
  unsigned at[4];
  __device__ __forceinline__ RowPlaces() {
    const unsigned lane = lane_number(), r = row_in(lane / 4), t = lane % 4;
#pragma unroll
    for (int n = 0; n < 4; ++n) at[n] = r * 128 + ((t / 2 ^ r) * 16 + t % 2 * 8 ^ 32 * n);
  }
};

/// Own rows times those of the other side, to the bit as in DoubleProducts: forward and backward need the same scores.
/// first, second: halves of the other side's tile. kUnrolled panels at a time, because operands loaded early may run
/// out of registers.
template <int kPanels, int kUnrolled, class E>
__device__ __forceinline__ void row_products(E (&x)[4][2][2], const E* own_tile, const E* first, const E* second) {
  const RowPlaces places;
  const unsigned first_row = threadIdx.x / 32 % 4 * 16 * 128;
  clear_fragments(x);
#pragma unroll kUnrolled
  for (int panel = 0; panel < kPanels; ++panel) {
    E a[8];
#pragma unroll
    for (int n = 0; n < 8; ++n)
      a[n] = number_at(own_tile, first_row + places.at[n / 2] + n % 2 * 1024 + panel * 64 * 128);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      E b[4];
#pragma unroll
      for (int n = 0; n < 4; ++n)
        b[n] = number_at(j < 2 ? first : second, places.at[n] + j % 2 * 1024 + panel * 16 * 128);
      multiply_64(x[j][0], x[j][1], a, b);
    }
  }
}

/// The offsets of two neighbouring columns of the rows that a lane contributes to a sum, for the first 8 rows.
struct ColumnPlaces {
  unsigned at[2];
  __device__ __forceinline__ ColumnPlaces() {
#pragma unroll
    for (unsigned e = 0; e < 2; ++e) at[e] = column_in(e) * 128 + (lane_number() / 4 ^ column_in(e)) * 16;
  }
};

/// sum += weights times 16 rows of the other side. tile: the first of the two tiles of weights.
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

/// Stores a lane's two rows of results, row[0] and row[1] of a box, from a channel on. add: to the numbers there. Sets
/// `not_finite` if one is not finite.
template <int kTiles>
__device__ __forceinline__ void store_double_rows(const double (&x)[kTiles][2][2], const Rows& rows, double* data,
                                                  int first_channel, int channels, const rules::Box& box,
                                                  rules::Int3 size, const int (&row)[2], double factor, bool add,
                                                  std::int32_t* not_finite) {
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
        double a = x[j][r][e] * factor, b = x[j + 1][r][e] * factor;
        if (rows.vectors && channel + 1 < channels) {
          auto& pair = *reinterpret_cast<double2*>(to + channel);
          if (add) a += pair.x, b += pair.y;
          pair = make_double2(a, b);
        } else {
          double &first = to[channel * rows.channel], &second = to[(channel + 1) * rows.channel];
          if (channel < channels) first = add ? first + a : a;
          if (channel + 1 < channels) second = add ? second + b : b;
        }
      }
  }
  if (zero != zero) *not_finite = 1;
}

}  // namespace anyflash::cuda
