// Shared by the product policies (products.cuh): a warp's registers, tiles in shared memory.
#pragma once

#include "cuda/common/instructions.cuh"

namespace anyflash::cuda {

template <class T, int kRowGroups, int kTiles>
__device__ __forceinline__ void clear(T (&x)[kRowGroups][kTiles][2]) {
#pragma unroll
  for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
    for (int j = 0; j < kTiles; ++j) x[i][j][0] = x[i][j][1] = 0;
}
template <class T, int kRowGroups, int kTiles>
__device__ __forceinline__ void copy(T (&to)[kRowGroups][kTiles][2], const T (&x)[kRowGroups][kTiles][2]) {
#pragma unroll
  for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
    for (int j = 0; j < kTiles; ++j) to[i][j][0] = x[i][j][0], to[i][j][1] = x[i][j][1];
}
template <class T, int kRowGroups, int kTiles>
__device__ __forceinline__ void add(T (&to)[kRowGroups][kTiles][2], const T (&x)[kRowGroups][kTiles][2]) {
#pragma unroll
  for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
    for (int j = 0; j < kTiles; ++j) to[i][j][0] += x[i][j][0], to[i][j][1] += x[i][j][1];
}

/// Rotates the slots by one. This way loops over slots need not be unrolled, although registers cannot be indexed.
template <class T, int kRowGroups, int kTiles>
__device__ __forceinline__ void rotate_slots(T (&x)[kRowGroups][kTiles][2]) {
#pragma unroll
  for (int n = 0; n < 2 * kTiles; ++n) {
    const T first = x[0][n / 2][n % 2];
#pragma unroll
    for (int i = 1; i < kRowGroups; ++i) x[i - 1][n / 2][n % 2] = x[i][n / 2][n % 2];
    x[kRowGroups - 1][n / 2][n % 2] = first;
  }
}

/// A tile of consecutive rows in shared memory, with `pad` bytes between them so that the loads of a fragment have no
/// bank conflicts.
template <class E, int kRows, int kWidth, int pad>
struct PaddedTile {
  static constexpr int kStride = kWidth + pad / sizeof(E), kSize = kRows * kStride, kPeriod = 1, kRowStep = kStride;
  __device__ __forceinline__ static unsigned at(unsigned row, unsigned column) { return row * kStride + column; }
};

/// Shared by the policies where a warp owns neighbouring rows.
template <class E, int key_pad, int value_pad>
struct WarpProducts {
  static constexpr int alignment = 16;
  template <int kRows, int kWidth>
  using KeyTile = PaddedTile<E, kRows, kWidth, key_pad>;
  template <int kRows, int kWidth>
  using ValueTile = PaddedTile<E, kRows, kWidth, value_pad>;

  template <int kRowGroups>
  __device__ __forceinline__ static int row_of(int slot) {
    return threadIdx.x / 32 * (8 * kRowGroups) + 8 * slot + threadIdx.x % 32 / 4;
  }
  __device__ __forceinline__ static void show() {}
};

}  // namespace anyflash::cuda
