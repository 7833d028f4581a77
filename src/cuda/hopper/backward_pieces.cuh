// The backward pass on Hopper (sm_90a) for float32 in pieces of bfloat16 (common/pieces.cuh) and head sizes up to 64;
// backward.cuh says what is computed.
//
// A block of threads takes two neighbouring key blocks of a head. Each of two warpgroups owns one of them and walks the
// query blocks that see it by itself: all of S^T, dP^T, dV, dK and its part of dQ, which is added to float32 sums in
// global memory, in no order. P^T is an operand from registers; dS^T goes through shared memory in pieces, since dQ
// needs it transposed. Sums leave the tensor cores after a tile (pieces.cuh). One warp loads: queries two tiles ahead,
// dout, which is needed for less of a tile's time, one. Bound by the tensor cores, six products for one.
//
// Pieces of q, k, v, dout and P are 2^16 times as large (pieces.h), hence dP, delta and dV 2^32 times, dQ and dK 2^48.
#pragma once

#include "cuda/common/pieces.cuh"
#include "cuda/hopper/backward_args.h"
#include "cuda/hopper/backward_registers.cuh"
#include "cuda/hopper/pieces.h"
#include "cuda/hopper/tiles.cuh"

namespace anyflash::cuda {

struct PieceBackwardShared {
  using Operand = __nv_bfloat16;
  static constexpr int kPiece = 64 * 64, kTile = kPieces * kPiece, kBytes = kTile * 2;
  alignas(1024) Operand k[2][kTile];
  alignas(1024) Operand v[2][kTile];
  alignas(1024) Operand q[2][kTile];
  alignas(1024) Operand dout[kTile];
  alignas(1024) Operand ds[2][kTile];  ///< dS^T, of each warpgroup
  alignas(16) float lse[2][64], delta[2][64], dlse[2][64];
  Word words[2][2][64];     ///< by stage and warpgroup
  std::int32_t tile[2];     ///< its query block among those of all heads, -1 behind the last
  std::uint32_t visits[2];  ///< bit w: warpgroup w's keys are seen; 8 + w: not by all
  Barrier keys, queries_full[2], queries_empty[2], dout_full, dout_empty;

  /// One thread's work, before a barrier of the block.
  __device__ __forceinline__ void begin() {
    keys.begin(1), dout_full.begin(1), dout_empty.begin(8);
    for (int i = 0; i < 2; ++i) queries_full[i].begin(1), queries_empty[i].begin(8);
    barriers_begun();
  }
};

template <class E>  // float32: a template lest other GPUs' code be made of it
class PieceBackwardBlock {
 public:
  using Shared = PieceBackwardShared;
  using Operand = Shared::Operand;
  static constexpr int kThreads = 3 * 128, kRegisters = 232, kLoaderRegisters = 40;

  __device__ __forceinline__ PieceBackwardBlock(const GroupBackwardArgs& args, Shared& shared)
      : args_(args), shared_(shared) {
    const auto& side = args.sides[keys];
    const auto task = static_cast<std::int32_t>(blockIdx.x), pairs = (side.blocks + 1) / 2, head = task / pairs;
    first_block_ = task % pairs * 2;  // under causal rules the first blocks are the longest
    b_ = head / side.heads, key_head_ = head % side.heads;
  }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) shared_.begin();
    if (__syncthreads_or(args_.late && *args_.careful != 0)) return;
    if (threadIdx.x >= 256) {
      give_registers<kLoaderRegisters>();
      if (threadIdx.x < 256 + 32) load();
    } else {
      take_registers<kRegisters>();
      compute();
    }
  }

 private:
  using Tile = float[8][4];
  struct Sums {
    Tile high, small;
  };
  using Weights = std::uint32_t[kPieces][4][4];

  __device__ __forceinline__ static unsigned group() { return threadIdx.x / 128; }
  /// This lane's first key of its block; the second is 8 behind it.
  __device__ __forceinline__ static unsigned row() { return threadIdx.x / 32 % 4 * 16 + lane_number() / 4; }

  // --- The warp that loads -------------------------------------------------------------------------------------------

  __device__ __forceinline__ void load() {
    const bool leads = lane_number() == 0;
    const auto& keys_side = args_.sides[keys];
    if (leads) {
      shared_.keys.arrive_and_expect(4 * Shared::kBytes);
      for (int w = 0; w < 2; ++w) {
        const auto block = (b_ * keys_side.heads + key_head_) * keys_side.blocks +
                           min(first_block_ + w, keys_side.blocks - 1);  // one that does not exist is not visited
        copy(shared_.k[w], keys, 0, block, shared_.keys);
        copy(shared_.v[w], keys, 1, block, shared_.keys);
      }
    }
    unsigned count = 0;
    for (auto h = key_head_ * args_.group_heads; h < (key_head_ + 1) * args_.group_heads; ++h) {
      const auto& list = group_of(args_, b_, h).queries_of_key_block;
      MergedRuns<2, 1> runs;
      runs.open(list, first_block_, keys_side.blocks);
      for (;; ++count) {
        std::int32_t words[1];
        const auto block = runs.find(words);
        if (block < 0) break;
        const unsigned stage = count % 2;
        auto& full = shared_.queries_full[stage];
        const auto tile = (b_ * args_.sides[queries].heads + h) * args_.sides[queries].blocks + block;
        const auto seen = __ballot_sync(0xffffffffu, words[0] != runs.hidden);
        const auto partial = __ballot_sync(0xffffffffu, words[0] < runs.hidden);
        shared_.queries_empty[stage].wait(count / 2 % 2 ^ 1);
        if (leads) {
          shared_.tile[stage] = tile, shared_.visits[stage] = seen | partial << 8;
          full.arrive_and_expect(Shared::kBytes + (args_.has_dlse ? 3 : 2) * 256 + __popc(partial) * 512);
          copy(shared_.q[stage], queries, 0, tile, full);
          copy_bytes(shared_.lse[stage], args_.lse + std::int64_t{tile} * 64, 256, full);
          copy_bytes(shared_.delta[stage], args_.delta + std::int64_t{tile} * 64, 256, full);
          if (args_.has_dlse) copy_bytes(shared_.dlse[stage], args_.dlse + std::int64_t{tile} * 64, 256, full);
        }
        __syncwarp();
        if (const auto at = words[0]; at < runs.hidden)
          copy_bytes(shared_.words[stage][lane_number()],
                     at < 0 ? args_.words + std::int64_t{~at} * 64 : list.words + std::int64_t{at} * 64, 512, full);
        shared_.dout_empty.wait(count % 2 ^ 1);
        if (leads) {
          shared_.dout_full.arrive_and_expect(Shared::kBytes);
          copy(shared_.dout, queries, 1, tile, shared_.dout_full);
        }
      }
    }
    shared_.queries_empty[count % 2].wait(count / 2 % 2 ^ 1);
    if (leads) shared_.tile[count % 2] = -1, shared_.queries_full[count % 2].arrive();
  }

  /// block: among those of all heads.
  __device__ __forceinline__ void copy(Operand* to, Side which, int n, std::int32_t block, Barrier& full) const {
    copy_bytes(to, args_.pieces[which][n] + std::int64_t{block} * Shared::kBytes, Shared::kBytes, full);
  }

  // --- The warpgroups that compute -----------------------------------------------------------------------------------

  __device__ __forceinline__ void compute() {
    Tile grad_k, grad_v;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) grad_k[j][e] = grad_v[j][e] = 0;
    Operand* const scores = shared_.ds[group()];
    const Operand* const k = shared_.k[group()];
    const bool far = *args_.terms.any_far != 0;
    shared_.keys.wait(0);
    for (unsigned count = 0;; ++count) {
      const unsigned stage = count % 2;
      shared_.queries_full[stage].wait(count / 2 % 2);
      const auto tile = shared_.tile[stage];
      if (tile < 0) break;
      const auto visits = shared_.visits[stage] >> group();
      if (!(visits & 1)) {
        shared_.dout_full.wait(count % 2);  // lest it be released twice before the other warpgroup does so once
        release(shared_.dout_empty);
        release(shared_.queries_empty[stage]);
        continue;
      }
      Tile p, ds;
      {
        Sums s, dp;
        row_products(s, k, shared_.q[stage]);
        shared_.dout_full.wait(count % 2);
        row_products(dp, shared_.v[group()], shared_.dout);
        products_wait_for<1>();
        join(p, s);
        weigh(p, stage, rests_of(args_, far, tile, 0), visits >> 8 & 1);
        products_wait_for<0>();
        join(ds, dp);
      }
      score_gradients(ds, p, shared_.delta[stage], args_.has_dlse ? shared_.dlse[stage] : nullptr);
      sync_threads<128>(1 + group());  // the last tile's dS is done with
      store_scores(scores, ds);
      Weights weights;
#pragma unroll
      for (int m = 0; m < 4; ++m) split_operand(weights, p, m, kPieceScale);
      show_to_products();
      sync_threads<128>(1 + group());
      Sums sums;
      value_gradient(sums, weights, shared_.dout);
      products_wait_for<0>();
      release(shared_.dout_empty);
      add(grad_v, sums);
      tile_products<false>(sums, scores, shared_.q[stage]);
      products_wait_for<0>();
      release(shared_.queries_empty[stage]);
      add(grad_k, sums);
      tile_products<true>(sums, scores, k);
      products_wait_for<0>();
      Tile grad_q;
      join(grad_q, sums);
      float* const to = args_.sums + std::int64_t{tile} * 4096 + threadIdx.x % 128 * 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) add_to_memory(to + j * 512, grad_q[j]);
    }
    store(grad_k, 0, args_.key_factors[0]);
    store(grad_v, 1, args_.key_factors[1]);
  }

  __device__ __forceinline__ static void release(Barrier& empty) {
    __syncwarp();
    if (lane_number() == 0) empty.arrive();
  }

  __device__ __forceinline__ static std::uint32_t piece(int n) { return n * (Shared::kPiece * 2 / 16); }

  /// Rows of K or V times rows of Q or dO, as in the forward pass and in PieceProducts, to the bit.
  __device__ __forceinline__ static void row_products(Sums& sums, const Operand* key_tile, const Operand* query_tile) {
    const auto a = describe_tile(key_tile, 0), b = describe_tile(query_tile, 0);
    products_begin();
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const auto at = columns_from<64>(16 * m);
#pragma unroll
      for (int n = 0; n < kSmallProducts; ++n)
        multiply<false, false>(sums.small, a + piece(second_piece(n)) + at, b + piece(first_piece(n)) + at, m + n > 0,
                               Operand());
      if (m < kLateChunk) multiply<false, false>(sums.high, a + at, b + at, m > 0, Operand());
    }
#pragma unroll
    for (int m = kLateChunk; m < 4; ++m)
      multiply<false, false>(sums.small, a + columns_from<64>(16 * m), b + columns_from<64>(16 * m), true, Operand());
    products_commit();
  }

  /// P^T times rows of dO.
  __device__ __forceinline__ static void value_gradient(Sums& sums, const Weights& weights, const Operand* dout) {
    const auto b = describe_tile(dout, 0);
    products_begin();
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const auto at = rows_from(16 * m);
#pragma unroll
      for (int n = 0; n < kSmallProducts; ++n)
        multiply<true>(sums.small, weights[first_piece(n)][m], b + piece(second_piece(n)) + at, m + n > 0, Operand());
      if (m < kLateChunk) multiply<true>(sums.high, weights[0][m], b + at, m > 0, Operand());
    }
#pragma unroll
    for (int m = kLateChunk; m < 4; ++m)
      multiply<true>(sums.small, weights[0][m], b + rows_from(16 * m), true, Operand());
    products_commit();
  }

  /// dS^T times rows of Q; transposed, dS times rows of K.
  template <bool kTransposed>
  __device__ __forceinline__ static void tile_products(Sums& sums, const Operand* scores, const Operand* rows) {
    const auto a = describe_tile(scores, 0), b = describe_tile(rows, 0);
    products_begin();
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const auto a_at = kTransposed ? rows_from(16 * m) : columns_from<64>(16 * m), b_at = rows_from(16 * m);
#pragma unroll
      for (int n = 0; n < kSmallProducts; ++n)
        multiply<kTransposed, true>(sums.small, a + piece(first_piece(n)) + a_at, b + piece(second_piece(n)) + b_at,
                                    m + n > 0, Operand());
      if (m < kLateChunk) multiply<kTransposed, true>(sums.high, a + a_at, b + b_at, m > 0, Operand());
    }
#pragma unroll
    for (int m = kLateChunk; m < 4; ++m) {
      const auto a_at = kTransposed ? rows_from(16 * m) : columns_from<64>(16 * m), b_at = rows_from(16 * m);
      multiply<kTransposed, true>(sums.small, a + a_at, b + b_at, true, Operand());
    }
    products_commit();
  }

  __device__ __forceinline__ static void join(Tile& to, Sums& sums) {
    keep(sums.high), keep(sums.small);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[j][e] = sums.high[j][e] + sums.small[j][e];
  }
  __device__ __forceinline__ static void add(Tile& to, Sums& sums) {
    keep(sums.high), keep(sums.small);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[j][e] += sums.high[j][e] + sums.small[j][e];
  }

  /// Scores become P. rest: of the tile's queries, null: 0.
  __device__ __forceinline__ void weigh(Tile& s, unsigned stage, const float* rest, bool partial) const {
    const unsigned first = 2 * (lane_number() % 4);
    const float* const lse = shared_.lse[stage] + first;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(lse + 8 * j);
      const float2 y = rest ? *reinterpret_cast<const float2*>(rest + first + 8 * j) : float2{0, 0};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float below = __fadd_rn(rounded_product(s[j][e], args_.factor), e % 2 == 0 ? -x.x : -x.y);
        below = __fadd_rn(below, e % 2 == 0 ? -y.x : -y.y);
        asm("min.NaN.f32 %0, %0, 0f00000000;" : "+f"(below));  // above by a rounding at most, which may be much
        s[j][e] = expf(below);
      }
    }
    if (!partial) return;
    const Word* const words = shared_.words[stage][group()] + row();
    hide(s, words[0] >> first, words[8] >> first);
  }

  /// Columns 16m and on, `size` times as large, as an operand.
  __device__ __forceinline__ static void split_operand(Weights& to, const Tile& x, int m, float size) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* const pair = &x[2 * m + n / 2][n % 2 * 2];
      split(pair[0] * size, pair[1] * size, to[0][m][n], to[1][m][n], to[2][m][n]);
    }
  }
  __device__ __forceinline__ static void store_scores(Operand* to, const Tile& ds) {
    const unsigned row = threadIdx.x / 32 % 4 * 16 + lane_number() % 16, half = lane_number() / 16;
    Weights x;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      split_operand(x, ds, m, 1.0f);
#pragma unroll
      for (int n = 0; n < kPieces; ++n)
        store_matrices(to + n * Shared::kPiece + row * 64 + ((2 * m + half) ^ row % 8) * 8, x[n][m]);
    }
  }

  /// This warpgroup's rows of dK (n = 0) or dV.
  __device__ __forceinline__ void store(const Tile& x, int n, float factor) const {
    const auto& side = args_.sides[keys];
    const auto block = first_block_ + static_cast<std::int32_t>(group());
    if (!side.gradients[n].data || block >= side.blocks) return;
    store_float_rows(x, side.gradients[n], head_data<E>(side.gradients[n], b_, key_head_), args_.channels[n],
                     box_of(side.grid, side.plain, block), side.grid.size, static_cast<int>(row()), factor,
                     args_.careful);
  }

  const GroupBackwardArgs& args_;
  Shared& shared_;
  std::int32_t b_, key_head_, first_block_;
};

/// What the kernel needs before it begins, from the portable kernel's numbers of rows; dQ's sums, zero. One block of
/// 128 threads for each query block of each head.
static __global__ void __launch_bounds__(128) prepare_piece_rows(const __grid_constant__ GroupBackwardArgs args) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.careful = 0, *args.terms.any_far = 0;
  auto* const sums = reinterpret_cast<float4*>(args.sums + blockIdx.x * std::int64_t{4096});
#pragma unroll
  for (int j = 0; j < 8; ++j) sums[j * 128 + threadIdx.x] = float4{0, 0, 0, 0};
  if (threadIdx.x >= 64) return;
  const auto at = blockIdx.x * std::int64_t{64} + threadIdx.x;
  const bool live = args.terms.live[blockIdx.x] >> threadIdx.x & 1;
  const auto of = [&](const void* numbers) { return static_cast<const float*>(numbers)[at]; };
  constexpr float product = kPieceScale * kPieceScale;  // so many times too large dP comes out
  args.lse[at] = live ? of(args.terms.lse) : __int_as_float(0x7f800000);
  args.delta[at] = live ? of(args.terms.delta) * product : 0.0f;
  args.dlse[at] = live ? of(args.terms.dlse) * product : 0.0f;
}

/// dQ from its sums. One block of 128 threads for each query block of each head.
static __global__ void __launch_bounds__(128)
    store_piece_query_gradients(const __grid_constant__ GroupBackwardArgs args) {
  const auto* const sums = reinterpret_cast<const float4*>(args.sums + blockIdx.x * std::int64_t{4096});
  float x[8][4];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float4 four = sums[j * 128 + threadIdx.x];
    x[j][0] = four.x, x[j][1] = four.y, x[j][2] = four.z, x[j][3] = four.w;
  }
  const auto& side = args.sides[queries];
  const auto& rows = side.gradients[0];
  const auto block = static_cast<std::int32_t>(blockIdx.x) % side.blocks;
  const auto head = static_cast<std::int32_t>(blockIdx.x) / side.blocks;
  store_float_rows(x, rows, head_data<float>(rows, head / side.heads, head % side.heads), args.channels[0],
                   box_of(side.grid, side.plain, block), side.grid.size,
                   static_cast<int>(threadIdx.x / 32 * 16 + lane_number() / 4), args.key_factors[0], args.careful);
}

}  // namespace anyflash::cuda
