// The two products of a tile on Hopper's warpgroups (sm_90a): the policy of float16 and bfloat16 there (products.cuh).
// Q and K are read from shared memory by descriptor, P from registers. Tiles are panels of 64 columns, their rows of
// 128 bytes swizzled.
#pragma once

#include "cuda/hopper/instructions.cuh"
#include "cuda/portable/products.cuh"

namespace anyflash::cuda {

/// A tile of kRows rows in panels of 64 columns of 16 bits: groups of 8 columns lie where their number, combined with
/// the row's by "exclusive or", says.
template <class E, int kRows, int kWidth>
struct SwizzledTile {
  static constexpr int kSize = kRows * kWidth, kPanel = kRows * 64;
  static constexpr int kPeriod = 8, kRowStep = 64;  ///< rows a multiple of 8 apart are alike
  __device__ __forceinline__ static unsigned at(unsigned row, unsigned column) {
    return column / 64 * kPanel + row * 64 + (column % 64 / 8 ^ row % 8) * 8 + column % 8;
  }
};

template <class E>
struct GroupProducts {
  using Number = float;
  static constexpr bool exact_infinities = true, swaps = false;
  static constexpr int alignment = 1024;
  template <int kRows, int kWidth>
  using KeyTile = SwizzledTile<E, kRows, kWidth>;
  template <int kRows, int kWidth>
  using ValueTile = SwizzledTile<E, kRows, kWidth>;
  static constexpr int chain = 128;  ///< the tensor cores cut off where float32 rounds: longer sums are made in two

  /// Slots 2m and 2m + 1 of a lane are rows of the m-th 64 of its warpgroup.
  template <int kSlots>
  __device__ __forceinline__ static int row_of(int slot) {
    const unsigned warp = threadIdx.x / 32;
    return warp / 4 * (32 * kSlots) + slot / 2 * 64 + warp % 4 * 16 + slot % 2 * 8 + threadIdx.x % 32 / 4;
  }

  __device__ __forceinline__ static void show() { show_to_products(); }

  template <int kRows, int kDepth, int kSlots, int kTiles>
  __device__ __forceinline__ static void scores(float (&s)[kSlots][kTiles][2], const E* q, const E* k) {
    static_assert(kTiles == 8 && kSlots % 2 == 0);
    const unsigned first_row = threadIdx.x / 128 * (32 * kSlots);
    const auto of_q = describe_tile(q + first_row * 64, 0), of_k = describe_tile(k, 0);
    float rest[kSlots][kTiles][2];
    products_begin();
#pragma unroll
    for (int m = 0; m < kSlots / 2; ++m) {
      const auto rows = of_q + m * (64 * 128 / 16);
#pragma unroll
      for (int c = 0; c < kDepth && c < chain; c += 16)
        multiply_group(s[2 * m], s[2 * m + 1], rows + units<kRows>(c), of_k + units<8 * kTiles>(c), c > 0, E());
#pragma unroll
      for (int c = chain; c < kDepth; c += 16)
        multiply_group(rest[2 * m], rest[2 * m + 1], rows + units<kRows>(c), of_k + units<8 * kTiles>(c), c > chain,
                       E());
    }
    products_wait();
    keep(s);
    if constexpr (kDepth > chain) keep(rest), add(s, rest);
  }

  template <class Tile, int kSlots, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void values(float (&o)[kSlots][kTiles][2], const float (&p)[kSlots][kKeyTiles][2],
                                                const E* v) {
    const auto of_v = describe_tile(v, 8 * kKeyTiles * 128);
    std::uint32_t a[kSlots / 2][kKeyTiles / 2][4];
#pragma unroll
    for (int m = 0; m < kSlots / 2; ++m)
#pragma unroll
      for (int key = 0; key < kKeyTiles; key += 2)
#pragma unroll
        for (int n = 0; n < 4; ++n) a[m][key / 2][n] = HalfProducts<E>::packed(p[2 * m + n % 2][key + n / 2]);
    keep(o);
    products_begin();
#pragma unroll
    for (int m = 0; m < kSlots / 2; ++m)
#pragma unroll
      for (int key = 0; key < kKeyTiles / 2; ++key)
        multiply_group(o[2 * m], o[2 * m + 1], a[m][key], of_v + key * (16 * 128 / 16), true, E());
    products_wait();
    keep(o);
  }

 private:
  /// Where column c of a tile of kRows rows begins, in the 16 bytes that descriptors count.
  template <int kRows>
  __device__ __forceinline__ static constexpr std::uint64_t units(int c) {
    return c / 64 * (kRows * 128 / 16) + c % 64 * 2 / 16;
  }

  /// Ties registers to this place, before or behind which products work on them.
  template <int kSlots, int kTiles>
  __device__ __forceinline__ static void keep(float (&x)[kSlots][kTiles][2]) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; ++j) asm volatile("" : "+f"(x[i][j][0]), "+f"(x[i][j][1])::"memory");
  }
};

}  // namespace anyflash::cuda
