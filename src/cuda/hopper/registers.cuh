// Between results of products in registers and operands of the next, and places in swizzled tiles.
#pragma once

#include <type_traits>

#include "cuda/hopper/transposed_products.cuh"

namespace anyflash::cuda {

/// Where columns c .. c + 15, c a multiple of 16, of a swizzled tile begin, in the 16 bytes that descriptors count.
template <int kRows>
__device__ __forceinline__ constexpr std::uint32_t columns_from(int c) {
  return c / 64 * (kRows * 128 / 16) + c % 64 * 2 / 16;
}
/// The same of rows.
__device__ __forceinline__ constexpr std::uint32_t rows_from(int r) { return r * 128 / 16; }

template <class E>
__device__ __forceinline__ std::uint32_t pair(float a, float b) {
  if constexpr (std::is_same_v<E, __half>) {
    const __half2 x = __floats2half2_rn(a, b);
    return *reinterpret_cast<const std::uint32_t*>(&x);
  } else {
    const __nv_bfloat162 x = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const std::uint32_t*>(&x);
  }
}

/// From results of products to operands.
template <class E, int kTiles>
__device__ __forceinline__ void pack(std::uint32_t (&to)[kTiles / 2][4], const float (&x)[kTiles][4]) {
#pragma unroll
  for (int m = 0; m < kTiles / 2; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n) to[m][n] = pair<E>(x[2 * m + n / 2][n % 2 * 2], x[2 * m + n / 2][n % 2 * 2 + 1]);
}

}  // namespace anyflash::cuda
