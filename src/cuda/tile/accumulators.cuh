// Conversions from products' results in registers to operands of the next, and offsets in swizzled tiles.
#pragma once

#include "cuda/portable/rows.cuh"
#include "cuda/tile/wgmma.cuh"

namespace anyflash::cuda {

/// The offset of columns c .. c + 15 (c a multiple of 16) of a swizzled tile, in the 16-byte units of descriptors.
template <int kRows>
__device__ __forceinline__ constexpr std::uint32_t columns_from(int c) {
  return c / 64 * (kRows * 128 / 16) + c % 64 * 2 / 16;
}
/// The same for rows.
__device__ __forceinline__ constexpr std::uint32_t rows_from(int r) { return r * 128 / 16; }

/// Ties registers to this place: after a wait, the results that products have written; before it, the operands that
/// they read.
template <int kTiles>
__device__ __forceinline__ void keep(float (&c)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
    asm volatile("" : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])::"memory");
}

template <int kTiles>
__device__ __forceinline__ void clear(float (&x)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[j][e] = 0;
}

/// This lane's first row of its warpgroup's 64; the second is 8 rows further.
__device__ __forceinline__ unsigned row_of_lane() { return threadIdx.x / 32 % 4 * 16 + lane_number() / 4; }

/// Turns results of products into operands. kClamped: numbers that are too large become the largest finite number.
template <class E, bool kClamped = false, int kTiles>
__device__ __forceinline__ void pack(std::uint32_t (&to)[kTiles / 2][4], const float (&x)[kTiles][4]) {
#pragma unroll
  for (int m = 0; m < kTiles / 2; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float a = x[2 * m + n / 2][n % 2 * 2], b = x[2 * m + n / 2][n % 2 * 2 + 1];
      to[m][n] = kClamped ? clamped_pair(a, b, E()) : packed_pair(a, b, E());
    }
}

/// stmatrix: four 8 x 8 matrices of 16-bit numbers to shared memory, from registers as load_matrices fills them.
__device__ __forceinline__ void store_matrices(void* row, const std::uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

/// The same, each matrix transposed.
__device__ __forceinline__ void store_matrices_transposed(void* row, const std::uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

/// Adds four neighbouring numbers to those in global memory, each atomically, in no fixed order.
__device__ __forceinline__ void add_to_memory(float* to, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

/// Stores a lane's two rows of results, `row` and `row + 8` of a box, as float32 rows with any strides. Sets `not_finite`
/// if one is not finite.
template <int kTiles>
__device__ __forceinline__ void store_float_rows(const float (&x)[kTiles][4], const Rows& rows, float* data,
                                                 int channels, const rules::Box& box, rules::Int3 size, int row,
                                                 float factor, std::int32_t* not_finite) {
  const bool pairs = rows.vectors && channels % 2 == 0;
  float zero = 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) zero += 0 * x[j][2 * r] + 0 * x[j][2 * r + 1];
    const auto c = entry_of(box, row + 8 * r);
    if (!rules::inside(c, size)) continue;
    float* const to = data + c[0] * rows.sequence[0] + c[1] * rows.sequence[1] + c[2] * rows.sequence[2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int channel = 8 * j + 2 * static_cast<int>(lane_number() % 4);
      const float a = x[j][2 * r] * factor, b = x[j][2 * r + 1] * factor;
      if (pairs && channel < channels) {
        *reinterpret_cast<float2*>(to + channel) = make_float2(a, b);
      } else {
        if (channel < channels) to[channel * rows.channel] = a;
        if (channel + 1 < channels) to[(channel + 1) * rows.channel] = b;
      }
    }
  }
  if (zero != zero) *not_finite = 1;
}

}  // namespace anyflash::cuda
