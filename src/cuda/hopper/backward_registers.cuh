// What Hopper's backward kernels do with the results of products in registers: rows are keys, columns queries or
// channels.
#pragma once

#include <type_traits>

#include "cuda/hopper/backward_args.h"
#include "cuda/hopper/transposed_products.cuh"
#include "cuda/portable/backward_shared.cuh"

namespace anyflash::cuda {

/// Where columns c .. c + 15, c a multiple of 16, of a swizzled tile begin, in the 16 bytes that descriptors count.
template <int kRows>
__device__ __forceinline__ constexpr std::uint64_t columns_from(int c) {
  return c / 64 * (kRows * 128 / 16) + c % 64 * 2 / 16;
}
/// The same of rows.
__device__ __forceinline__ constexpr std::uint64_t rows_from(int r) { return r * 128 / 16; }

/// exp(score - lse). A row with one key gets 1, however large its score is, if the score is the forward pass's to the
/// bit: so nothing is folded together. Where it is not, it may lie above lse by a rounding, which may be much.
__device__ __forceinline__ float probability(float score, float lse) {
  float x = __fadd_rn(score, -lse);
  asm("min.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return exp2_approximately(x * 1.44269504f);
}

/// Products become P. lse: of the first column.
template <int kTiles>
__device__ __forceinline__ void probabilities(float (&s)[kTiles][4], const float* lse, float factor) {
  lse += 2 * (lane_number() % 4);
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const float2 x = *reinterpret_cast<const float2*>(lse + 8 * j);
    s[j][0] = probability(rounded_product(s[j][0], factor), x.x);
    s[j][1] = probability(rounded_product(s[j][1], factor), x.y);
    s[j][2] = probability(rounded_product(s[j][2], factor), x.x);
    s[j][3] = probability(rounded_product(s[j][3], factor), x.y);
  }
}

/// dP becomes dS. delta: of the first column.
template <int kTiles>
__device__ __forceinline__ void score_gradients(float (&x)[kTiles][4], const float (&p)[kTiles][4],
                                                const float* delta) {
  delta += 2 * (lane_number() % 4);
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const float2 y = *reinterpret_cast<const float2*>(delta + 8 * j);
    x[j][0] = p[j][0] * (x[j][0] - y.x);
    x[j][1] = p[j][1] * (x[j][1] - y.y);
    x[j][2] = p[j][2] * (x[j][2] - y.x);
    x[j][3] = p[j][3] * (x[j][3] - y.y);
  }
}

/// P of hidden pairs becomes 0. a, b: the words of the lane's two keys, from the lane's first column on.
template <int kTiles>
__device__ __forceinline__ void hide(float (&p)[kTiles][4], Word a, Word b) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    if (!(a >> (8 * j) & 1)) p[j][0] = 0;
    if (!(a >> (8 * j + 1) & 1)) p[j][1] = 0;
    if (!(b >> (8 * j) & 1)) p[j][2] = 0;
    if (!(b >> (8 * j + 1) & 1)) p[j][3] = 0;
  }
}

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

/// Where a lane's keys are: row `row` of a block, and the row 8 behind it.
struct KeyPlace {
  std::int32_t b, key_head, block, row;
};

/// A warpgroup's rows of dK (n = 0) or dV, from a channel on.
template <class E, int kTiles>
__device__ __forceinline__ void store_key_gradients(const float (&x)[kTiles][4], const GroupBackwardArgs& args,
                                                    const KeyPlace& at, int n, int first_channel, float factor) {
  const auto& side = args.sides[keys];
  const auto& rows = side.gradients[n];
  if (!rows.data || at.block >= side.blocks) return;
  float zero = 0;
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) zero += 0 * x[j][e];
  if (zero != zero) *args.careful = 1;
  E* const data = head_data<E>(rows, at.b, at.key_head);
  const auto box = box_of(side.grid, side.plain, at.block);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto c = entry_of(box, at.row + half * 8);
    if (!rules::inside(c, side.grid.size)) continue;
    E* const to = data + c[0] * rows.sequence[0] + c[1] * rows.sequence[1] + c[2] * rows.sequence[2];
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const int channel = first_channel + 8 * j + 2 * static_cast<int>(lane_number() % 4);
      if (channel < args.channels[n])
        *reinterpret_cast<std::uint32_t*>(to + channel) = pair<E>(x[j][2 * half] * factor, x[j][2 * half + 1] * factor);
    }
  }
}

}  // namespace anyflash::cuda
