// The non-finite fallback, for which the code sets `non_finite`. A product P V over a whole tile turns a hidden V that
// is not finite into NaN, since its P is 0. So rows of V with a NaN or an infinity are left out of the product, and
// added only to the rows that see them. Numbers too large for split bfloat16 (split_bf16.cuh) are handled alike: sums of
// products of two numbers below 2^44 do not overflow.
#pragma once

#include <cfloat>
#include <type_traits>

#include "cuda/portable/products.cuh"
#include "cuda/portable/rows.cuh"
#include "rules/bits.h"

namespace anyflash::cuda {

template <class T>
__device__ __forceinline__ bool is_finite(T x) {
  return x - x == T(0);
}

/// May a number take part in the fallback's products?
template <class Products, class T>
__device__ __forceinline__ bool bears(T x) {
  return Products::exact_infinities ? is_finite(x) : fabs(x) < T(0x1p44);
}

/// A mean of finite numbers is finite, however it is rounded. all_finite(): are the numbers finite?
template <class T, class AllFinite>
__device__ __forceinline__ T finite_mean(T mean, const AllFinite& all_finite) {
  if (!isinf(mean) || !all_finite()) return mean;
  return copysign(sizeof(T) == 8 ? static_cast<T>(DBL_MAX) : static_cast<T>(FLT_MAX), mean);
}

/// A mean of numbers of type E, rounded to E: never infinite if the mean is finite.
template <class E, class T>
__device__ __forceinline__ E rounded_mean(T mean) {
  if constexpr (sizeof(E) == 2) {
    constexpr T largest = std::is_same_v<E, __half> ? T(65504) : T(0x1.fep127);
    if (is_finite(mean) && fabs(mean) > largest) mean = copysign(largest, mean);
  }
  return rounded<E>(mean);
}

/// Replaces non-finite numbers of kRows rows in memory by those of the tile `from`, except by NaN (0 times an
/// infinity). By one warp. first: the row in `places` of the tile's row 0. T: the computation's type.
template <int kRows, int kWidth, int kStride, class T, class E, class Places>
__device__ __noinline__ void replace_not_finite(const E* from, const Rows& rows, E* data, const Places& places,
                                                int first, int channels) {
  for (int i = static_cast<int>(lane_number()); i < kRows * kWidth; i += 32) {
    const int row = i / kWidth, channel = i % kWidth;
    std::int64_t at;
    if (channel >= channels || !places.find(rows, first + row, at)) continue;
    E& stored = data[at + channel * rows.channel];
    const E other = from[row * kStride + channel];
    if (!is_finite(static_cast<T>(stored)) && static_cast<T>(other) == static_cast<T>(other)) stored = other;
  }
}

/// mask: the rows of a tile with a NaN or an infinity. With kClean also rows that the products cannot take, and all
/// these become 0. Called by all threads.
template <class Products, class Tile, int kRows, int kWidth, bool kClean, class E>
__device__ __noinline__ void mark_not_finite(E* tile, unsigned long long& mask) {
  __syncthreads();  // the last mask and the tile are no longer in use
  if (threadIdx.x == 0) mask = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < kRows; row += blockDim.x) {
    bool bad = false;
    for (int c = 0; c < kWidth; ++c) {
      const auto x = static_cast<typename Products::Number>(tile[Tile::at(row, c)]);
      bad |= kClean ? !bears<Products>(x) : !is_finite(x);
    }
    if (!bad) continue;
    atomicOr(&mask, 1ull << row);
    if (kClean)
      for (int c = 0; c < kWidth; ++c) tile[Tile::at(row, c)] = zero<E>();
  }
  Products::show();
  __syncthreads();
}

/// Recomputes products that are NaN or belong to rows that are not finite, with IEEE arithmetic. x, y: the tiles;
/// y_not_finite: rows of y.
template <class Products, class XTile, class YTile, int kDepth, int kRowGroups, int kTiles, class T, class E>
__device__ __forceinline__ void recompute_scores(T (&s)[kRowGroups][kTiles][2], const E* x, const E* y,
                                                 unsigned long long y_not_finite) {
#pragma unroll 1
  for (int i = 0; i < kRowGroups; ++i) {
    const int own = Products::template row_of<kRowGroups>(i);
    const auto of_x = [&](int c) { return static_cast<T>(x[XTile::at(own, c)]); };
    bool bad = false;
#pragma unroll 4
    for (int c = 0; c < kDepth; ++c) bad |= !is_finite(of_x(c));
    T row[2 * kTiles];
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) row[n] = s[0][n / 2][n % 2];
#pragma unroll 1
    for (int n = 0; n < 2 * kTiles; ++n) {
      const int column = 8 * (n / 2) + 2 * (lane_number() % 4) + n % 2;
      if (!bad && row[n] == row[n] && !(y_not_finite >> column & 1)) continue;
      T sum = 0;  // channels beyond the tensors' are 0 in both tiles
#pragma unroll 4
      for (int c = 0; c < kDepth; ++c) sum += of_x(c) * static_cast<T>(y[YTile::at(column, c)]);
      row[n] = sum;
    }
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) s[0][n / 2][n % 2] = row[n];
    rotate_slots(s);
  }
}

/// o += p V for the rows of V that were left out. sees(i, row): does slot i see it? row_at(row): the row's offset.
/// value(begin, channel): its number in that channel.
template <class T, int kRowGroups, int kKeyTiles, int kTiles, class Sees, class RowAt, class Value>
__device__ __forceinline__ void add_not_finite(T (&o)[kRowGroups][kTiles][2], const T (&p)[kRowGroups][kKeyTiles][2],
                                               unsigned long long left_out, const Sees& sees, const RowAt& row_at,
                                               const Value& value) {
  T local[kRowGroups][2 * kKeyTiles];  // in local memory, since the rows are taken one by one
#pragma unroll
  for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
    for (int n = 0; n < 2 * kKeyTiles; ++n) local[i][n] = p[i][n / 2][n % 2];
  unsigned long long seen[kRowGroups]{}, shown = 0;
#pragma unroll 1
  for (auto left = left_out; left != 0; left &= left - 1) {
    const int row = rules::lowest_bit(left);
    bool any = false;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      const bool sees_it = sees(i, row);
      seen[i] |= static_cast<unsigned long long>(sees_it) << row;
      any |= sees_it;
    }
    if (__any_sync(0xffffffffu, any)) shown |= 1ull << row;
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    T sum[kRowGroups][2]{};  // as a separate sum: one chain over all keys would lose more accuracy
#pragma unroll 1
    for (auto left = shown; left != 0; left &= left - 1) {
      const int row = rules::lowest_bit(left), channel = 8 * j + 2 * (lane_number() % 4);
      const auto begin = row_at(row);
      const T x[2] = {value(begin, channel), value(begin, channel + 1)};
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i) {
        const T weight = __shfl_sync(0xffffffffu, local[i][row / 8 * 2 + row % 2], (lane_number() & ~3u) | row % 8 / 2);
        if (!(seen[i] >> row & 1)) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) sum[i][e] += weight * x[e];
      }
    }
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i)
      if (seen[i]) o[i][j][0] += sum[i][0], o[i][j][1] += sum[i][1];
  }
}

}  // namespace anyflash::cuda
