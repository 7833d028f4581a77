// Operations of Hopper's backward kernels on results of products in registers. Rows are keys, columns are queries or
// channels.
#pragma once

#include <type_traits>

#include "cuda/hopper/backward_args.h"
#include "cuda/portable/backward_shared.cuh"
#include "cuda/tile/accumulators.cuh"
#include "cuda/tile/runs.cuh"

namespace anyflash::cuda {

inline constexpr float kLog2E = 1.44269504f;

/// exp(score - lse) / 2^rest. A row with one key gets exactly 1, however large its score is, if score equals the
/// forward pass's to the bit: so score and lse are not fused into anything. Otherwise the score may exceed lse by
/// rounding, which may be a lot.
__device__ __forceinline__ float probability(float score, float lse, float rest) {
  float x = fmaf(__fadd_rn(score, -lse), kLog2E, -rest);
  asm("min.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return exp2_approximately(x);
}

/// The lse remainders of two columns, as `probability` takes them. rests: null: 0 for all columns.
__device__ __forceinline__ float2 lse_remainders_at(const float* rests, int column) {
  if (!rests) return {0, 0};
  const float2 x = *reinterpret_cast<const float2*>(rests + column);
  return {x.x * kLog2E, x.y * kLog2E};
}

/// Turns products into P. lse, rest: of the first column; rest: null: 0 for all columns.
template <int kTiles>
__device__ __forceinline__ void probabilities(float (&s)[kTiles][4], const float* lse, const float* rest,
                                              float factor) {
  const int column = 2 * static_cast<int>(lane_number() % 4);
  lse += column;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const float2 x = *reinterpret_cast<const float2*>(lse + 8 * j), y = lse_remainders_at(rest, column + 8 * j);
    s[j][0] = probability(rounded_product(s[j][0], factor), x.x, y.x);
    s[j][1] = probability(rounded_product(s[j][1], factor), x.y, y.y);
    s[j][2] = probability(rounded_product(s[j][2], factor), x.x, y.x);
    s[j][3] = probability(rounded_product(s[j][3], factor), x.y, y.y);
  }
}

/// The lse remainders of a tile's rows from `first` on, in global memory, since they are rarely needed. Null if there
/// are none.
__device__ __forceinline__ const float* lse_remainders_of(const GroupBackwardArgs& args, bool any, std::int32_t tile,
                                                          int first) {
  return any ? static_cast<const float*>(args.terms.rest) + std::int64_t{tile} * 64 + first : nullptr;
}

/// The place of the biases of a lane's pairs, and ALiBi's terms: of its first column (a query) and first row (a key).
struct BiasPlace {
  const Numbers& bias;
  std::int64_t at;
  std::int32_t queries, keys;  ///< how many exist from there on
  float slope = 0, gap = 0;    ///< ALiBi's, if there is one; the first pair's difference of coordinates

  __device__ __forceinline__ BiasPlace(const GroupBackwardArgs& args, std::int32_t tile, int first_query,
                                       std::int32_t key)
      : bias(args.bias) {
    const auto& side = args.sides[Side::queries];
    const auto head = tile / side.blocks, query = (tile - head * side.blocks) * 64 + first_query;
    const auto b = head / side.heads, h = head - b * side.heads;
    at = b * bias.batch + h * bias.head + query * bias.query + key * bias.key;
    queries = side.grid.size[2] - query, keys = args.sides[Side::keys].grid.size[2] - key;
    if (!args.alibi.data) return;
    slope = read_number<float>(args.alibi, b * args.alibi.batch + h * args.alibi.head);
    gap = static_cast<float>(query - key + args.alibi_offset);
  }

  /// x: of columns from 8 first_tile on. T: the bias's type.
  template <class T, int kTiles>
  __device__ __forceinline__ void read(float (&x)[kTiles][4], int first_tile) const {
    const T* const from = reinterpret_cast<const T*>(bias.data) + at;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = 8 * (first_tile + j) + e % 2, row = e / 2 * 8;
        x[j][e] = column < queries && row < keys ? static_cast<float>(from[column * bias.query + row * bias.key]) : 0;
      }
  }
};

/// This lane's row in a 64 x 64 tile of queries and keys, for ldmatrix or stmatrix of the four 8 x 8 matrices of 16
/// queries and its warp's 16 keys. Their order: the first 8 queries, then the others; within both, the first 8 keys
/// first. In registers keys are rows, so the matrices are transposed.
__device__ __forceinline__ unsigned score_place() {
  const unsigned lane = lane_number(), row = lane / 16 * 8 + lane % 8;
  return row * 64 + ((threadIdx.x / 32 % 4 * 2 + lane / 8 % 2) ^ lane % 8) * 8;
}

/// 16-bit biases of 16 queries and a warp's keys, loaded by TMA: `from`, see score_place.
template <class T>
__device__ __forceinline__ void read_copied(float (&x)[2][4], const void* from) {
  std::uint32_t pairs[4];
  load_matrices_transposed(pairs, from);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    float2 y;
    if constexpr (std::is_same_v<T, __half>) {
      y = __half22float2(*reinterpret_cast<const __half2*>(&pairs[n]));
    } else {
      y = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pairs[n]));
    }
    x[n / 2][n % 2 * 2] = y.x, x[n / 2][n % 2 * 2 + 1] = y.y;
  }
}

/// Turns products into P, `p`, and P times the soft cap's derivative, s. copied: the tile of biases that TMA loaded,
/// whose first column is query first_query. rest: null: 0 for all columns. a, b: the mask words of the lane's two keys,
/// from its first column on. The scores equal those of ScoreTerms::finish, to the bit.
template <class E, bool kCapped, bool kCopied, int kTiles>
__device__ __forceinline__ void general_probabilities(float (&s)[kTiles][4], std::uint32_t (&p)[kTiles / 2][4],
                                                      const GroupBackwardArgs& args, const BiasPlace& place,
                                                      const E* copied, int first_query, const float* lse,
                                                      const float* rest, Word a, Word b) {
  lse += 2 * (lane_number() % 4);
  const bool rows = args.bias.query != 0;  // otherwise one row serves all queries
  const unsigned lane = lane_number();
  copied += rows ? first_query * 64 + score_place() : (threadIdx.x / 32 % 4 * 2 + lane / 8 % 2) * 8;
  const int step = rows ? 1024 : 0;
#pragma unroll
  for (int first = 0; first < kTiles; first += 2) {
    float x[2][4] = {};
    if constexpr (kCopied) {
      const E* const from = copied + first / 2 * step;
      if (args.bias_copied) args.bias.type == 0 ? read_copied<__half>(x, from) : read_copied<__nv_bfloat16>(x, from);
    } else if (args.bias.data) {
      args.bias.type == 0   ? place.read<__half>(x, first)
      : args.bias.type == 1 ? place.read<__nv_bfloat16>(x, first)
                            : place.read<float>(x, first);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 of_row = *reinterpret_cast<const float2*>(lse + 8 * (first + j));
      const float2 rest_of_row = lse_remainders_at(rest, 2 * static_cast<int>(lane % 4) + 8 * (first + j));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& product = s[first + j][e];
        float y = rounded_product(product, args.factor), derivative = 1;
        if constexpr (kCapped) {
          const float capped = tanhf(rounded_product(y, args.cap_inverse));
          derivative = fmaf(-capped, capped, 1.0f);
          y = rounded_product(capped, args.cap);
        }
        if (args.bias.data) y += x[j][e];
        if (args.alibi.data) y = fmaf(-place.slope, fabsf(place.gap + (8 * (first + j) + e % 2 - e / 2 * 8)), y);
        const bool seen = (e < 2 ? a : b) >> (8 * (first + j) + e % 2) & 1;
        x[j][e] =
            seen ? probability(y, e % 2 == 0 ? of_row.x : of_row.y, e % 2 == 0 ? rest_of_row.x : rest_of_row.y) : 0.0f;
        product = x[j][e] * derivative;
      }
    }
    pack<E>(reinterpret_cast<std::uint32_t (&)[1][4]>(p[first / 2]), x);
    asm volatile("" ::: "memory");  // so that not all are read at once: there are too few registers
  }
}

/// Turns dP into dS / P. delta, dlse (null: 0): of the first column. The larger difference comes first: where dP and
/// delta cancel, dlse remains.
template <int kTiles>
__device__ __forceinline__ void differences(float (&x)[kTiles][4], const float* delta, const float* dlse) {
  const auto column = 2 * (lane_number() % 4);
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const float2 y = *reinterpret_cast<const float2*>(delta + column + 8 * j);
    x[j][0] -= y.x, x[j][1] -= y.y, x[j][2] -= y.x, x[j][3] -= y.y;
  }
  if (dlse) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 y = *reinterpret_cast<const float2*>(dlse + column + 8 * j);
      x[j][0] += y.x, x[j][1] += y.y, x[j][2] += y.x, x[j][3] += y.y;
    }
  }
}

/// Turns dP into dS.
template <int kTiles>
__device__ __forceinline__ void score_gradients(float (&x)[kTiles][4], const float (&p)[kTiles][4], const float* delta,
                                                const float* dlse) {
  differences(x, delta, dlse);
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[j][e] *= p[j][e];
}

/// The sums of the bias's gradient for a tile's query block `cell` and a key block; null if that query block does not
/// exist.
__device__ __forceinline__ float* bias_sums_of(const GroupBackwardArgs& args, std::int32_t tile, int cell,
                                               std::int32_t key_block) {
  const auto& side = args.sides[Side::queries];
  const auto head = tile / side.blocks, block = tile - head * side.blocks + cell;
  if (block >= side.blocks) return nullptr;
  const auto b = args.bias_size[0] == 1 ? 0 : head / side.heads, h = args.bias_size[1] == 1 ? 0 : head % side.heads;
  const auto query_block = (std::int64_t{b} * args.bias_size[1] + h) * side.blocks + block;
  return args.bias_sums + (query_block * args.sides[Side::keys].blocks + key_block) * 4096;
}

/// P of hidden pairs becomes 0. a, b: the mask words of the lane's two keys, from the lane's first column on.
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

/// The place of a lane's keys: row `row` of a block, and the row 8 further.
struct KeyPlace {
  std::int32_t b, key_head, block, row;
};

/// Transposes 4 x 4 numbers over four lanes: lane t has number t of each of four rows, and gets row t.
__device__ __forceinline__ void transpose_quads(std::uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool high = lane_number() & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const auto sent = high ? x[i] : x[i | bit];
      const auto got = __shfl_xor_sync(0xffffffffu, sent, bit);
      (high ? x[i] : x[i | bit]) = got;
    }
  }
}

/// Stores a warpgroup's rows of dK (n = 0) or dV, from a channel on. Reports a NaN or an infinity, even if the gradient
/// is not wanted: dK shows which dS, and so which gradient of the bias, is not finite.
template <class E, int kTiles>
__device__ __forceinline__ void store_key_gradients(const float (&x)[kTiles][4], const GroupBackwardArgs& args,
                                                    const KeyPlace& at, int n, int first_channel, float factor) {
  const auto& side = args.sides[keys];
  const auto& rows = side.gradients[n];
  if (at.block >= side.blocks) return;
  float zero = 0;
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) zero += 0 * x[j][e];
  if (zero != zero) *args.not_finite = 1;
  if (!rows.data) return;
  E* const data = head_data<E>(rows, at.b, at.key_head);
  const rules::Box box{origin_of(args.cuts[keys], at.block), side.grid.extent, side.grid.step};
  first_channel += static_cast<int>(lane_number() % 4 * 8);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto c = entry_of(box, at.row + half * 8);
    const bool exists = rules::inside(c, side.grid.size);
    E* const to = data + c[0] * rows.sequence[0] + c[1] * rows.sequence[1] + c[2] * rows.sequence[2] + first_channel;
#pragma unroll
    for (int j = 0; j < kTiles; j += 4) {
      std::uint32_t chunk[4];  // 8 channels
#pragma unroll
      for (int i = 0; i < 4; ++i)
        chunk[i] = packed_pair(x[j + i][2 * half] * factor, x[j + i][2 * half + 1] * factor, E());
      transpose_quads(chunk);
      if (exists && first_channel + 8 * j < args.channels[n])
        *reinterpret_cast<uint4*>(to + 8 * j) = uint4{chunk[0], chunk[1], chunk[2], chunk[3]};
    }
  }
}

}  // namespace anyflash::cuda
