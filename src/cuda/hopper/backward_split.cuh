// The backward pass on Hopper (sm_90a) for split-bfloat16 float32 (common/split_bf16.cuh) and head sizes up to 64;
// backward.cuh describes the algorithm.
//
// A thread block takes two neighbouring key blocks of a head. Each of two warpgroups owns one of them and walks the
// query blocks that see it on its own. It computes all of S^T, dP^T, dV, dK, and its part of dQ, which is added to
// float32 sums in global memory, in no fixed order. P^T is an operand from registers; dS^T goes through shared memory
// as bfloat16 terms, since dQ needs it transposed. Sums leave the tensor cores after each tile (split_products.cuh). One
// warp loads: Q two tiles ahead, and dO, which is used for less of a tile's time, one. Bound by the tensor cores, six
// products for one (three with two terms). In registers rows are keys, and columns are queries or channels.
//
// The terms of q, k, v, dout and P are scaled by 2^16 (split_bf16.h), hence dP, delta and dV by 2^32, dQ and dK by 2^48.
#pragma once

#include "cuda/hopper/backward_registers.cuh"
#include "cuda/hopper/backward_task.cuh"
#include "cuda/hopper/split_products.cuh"

namespace anyflash::cuda {

/// Rows of K or V times rows of Q or dO: to the bit as in the forward pass, and, with three terms, as in SplitProducts.
template <int bf16_terms>
__device__ __forceinline__ void row_products(SplitSums& sums, const SplitTile<bf16_terms>& key_tile,
                                             const SplitTile<bf16_terms>& query_tile) {
  const auto a = describe_tile(&key_tile, 0), b = describe_tile(&query_tile, 0);
  wgmma_fence();
  issue_products<bf16_terms>(sums, [&](SplitSums::Tile& sum, int first, int second, int m, bool adds) {
    const auto at = columns_from<64>(16 * m);
    wgmma<false, false>(sum, a + key_tile.term(second) + at, b + query_tile.term(first) + at, adds, __nv_bfloat16());
  });
  wgmma_commit();
}

/// P^T times rows of dO, or dS^T times rows of Q.
template <int bf16_terms>
__device__ __forceinline__ void weighted_rows(SplitSums& sums, const std::uint32_t (&weights)[bf16_terms][4][4],
                                              const SplitTile<bf16_terms>& rows) {
  const auto b = describe_tile(&rows, 0);
  wgmma_fence();
  issue_products<bf16_terms>(sums, [&](SplitSums::Tile& sum, int first, int second, int m, bool adds) {
    wgmma<true>(sum, weights[first][m], b + rows.term(second) + rows_from(16 * m), adds, __nv_bfloat16());
  });
  wgmma_commit();
}

/// dS^T times rows of Q; transposed, dS times rows of K.
template <bool kTransposed, int bf16_terms>
__device__ __forceinline__ void tile_products(SplitSums& sums, const SplitTile<bf16_terms>& scores,
                                              const SplitTile<bf16_terms>& rows) {
  const auto a = describe_tile(&scores, 0), b = describe_tile(&rows, 0);
  wgmma_fence();
  issue_products<bf16_terms>(sums, [&](SplitSums::Tile& sum, int first, int second, int m, bool adds) {
    const auto at = a + scores.term(first) + (kTransposed ? rows_from(16 * m) : columns_from<64>(16 * m));
    wgmma<kTransposed, true>(sum, at, b + rows.term(second) + rows_from(16 * m), adds, __nv_bfloat16());
  });
  wgmma_commit();
}

/// Turns scores into P. rest: lse remainders of the tile's queries, null: 0. words: of its keys, null: no pair is
/// hidden.
__device__ __forceinline__ void weigh(SplitSums::Tile& s, const float* lse, const float* rest, const Word* words,
                                      float factor) {
  const unsigned first = 2 * (lane_number() % 4);
  lse += first;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 x = *reinterpret_cast<const float2*>(lse + 8 * j);
    const float2 y = rest ? *reinterpret_cast<const float2*>(rest + first + 8 * j) : float2{0, 0};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float below = __fadd_rn(rounded_product(s[j][e], factor), e % 2 == 0 ? -x.x : -x.y);
      below = __fadd_rn(below, e % 2 == 0 ? -y.x : -y.y);
      asm("min.NaN.f32 %0, %0, 0f00000000;" : "+f"(below));  // positive only by rounding, which may be a lot
      s[j][e] = expf(below);
    }
  }
  if (words) hide(s, words[row_of_lane()] >> first, words[row_of_lane() + 8] >> first);
}

/// Adds a tile to sums in global memory, in the order of the warpgroup's registers (backward_sums.cuh).
__device__ __forceinline__ void add_to_sums(float* to, const SplitSums::Tile& x) {
#pragma unroll
  for (int j = 0; j < 8; ++j) add_to_memory(to + j * 512 + threadIdx.x % 128 * 4, x[j]);
}

/// 64 channels, from `first` on, of a key block's rows of dK (n = 0) or dV.
__device__ __forceinline__ void store_gradient(const SplitSums::Tile& x, const GroupBackwardArgs& args, std::int32_t b,
                                               std::int32_t key_head, std::int32_t block, int n, int first) {
  const auto& side = args.sides[keys];
  const auto& rows = side.gradients[n];
  if (!rows.data || block >= side.blocks) return;
  store_float_rows(x, rows, head_data<float>(rows, b, key_head) + first * rows.channel, args.channels[n] - first,
                   box_of(side.grid, side.plain, block), side.grid.size, static_cast<int>(row_of_lane()),
                   args.key_factors[n], args.not_finite);
}

template <int bf16_terms>
struct SplitBackwardShared {
  using SplitTile = cuda::SplitTile<bf16_terms>;
  SplitTile k[2], v[2], q[2], dout;
  SplitTile ds[2];  ///< dS^T of each warpgroup
  alignas(16) float lse[2][64], delta[2][64], dlse[2][64];
  Word words[2][2][64];     ///< by stage and warpgroup
  std::int32_t tile[2];     ///< its query block among those of all heads; -1 after the last
  std::uint32_t visits[2];  ///< bit w: warpgroup w's keys are visible; 8 + w: not all pairs are
  Barrier keys, queries_full[2], queries_empty[2], dout_full, dout_empty;

  /// Called by one thread, before a barrier of the thread block.
  __device__ __forceinline__ void begin() {
    keys.begin(1), dout_full.begin(1), dout_empty.begin_for_warps(8);
    for (int i = 0; i < 2; ++i) queries_full[i].begin(1), queries_empty[i].begin_for_warps(8);
    barriers_begun();
  }
};

template <int bf16_terms>  // bfloat16 terms of a number
class SplitBackwardBlock : public BackwardTask<GroupBackwardArgs, SplitBackwardShared<bf16_terms>, 2, 232, 40> {
 public:
  using Task = BackwardTask<GroupBackwardArgs, SplitBackwardShared<bf16_terms>, 2, 232, 40>;
  using Task::Task;

  __device__ __forceinline__ void run() { this->load_and_compute(*this); }

 private:
  friend Task;
  using Task::args_, Task::shared_, Task::b_, Task::key_head_, Task::first_block_;
  using SplitTile = cuda::SplitTile<bf16_terms>;
  using Tile = SplitSums::Tile;

  __device__ __forceinline__ static unsigned group() { return threadIdx.x / 128; }

  // --- The producer warp ---------------------------------------------------------------------------------------------

  __device__ __forceinline__ void load() {
    const bool leads = lane_number() == 0;
    const auto& keys_side = args_.sides[keys];
    if (leads) {
      shared_.keys.arrive_and_expect(4 * SplitTile::kBytes);
      for (int w = 0; w < 2; ++w) {
        const auto block = (b_ * keys_side.heads + key_head_) * keys_side.blocks +
                           min(first_block_ + w, keys_side.blocks - 1);  // a block that does not exist is not visited
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
          full.arrive_and_expect(SplitTile::kBytes + (args_.has_dlse ? 3 : 2) * 256 + __popc(partial) * 512);
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
          shared_.dout_full.arrive_and_expect(SplitTile::kBytes);
          copy(shared_.dout, queries, 1, tile, shared_.dout_full);
        }
      }
    }
    shared_.queries_empty[count % 2].wait(count / 2 % 2 ^ 1);
    if (leads) shared_.tile[count % 2] = -1, shared_.queries_full[count % 2].arrive();
  }

  /// block: its number among those of all heads.
  __device__ __forceinline__ void copy(SplitTile& to, Side which, int n, std::int32_t block, Barrier& full) const {
    copy_bytes(&to, args_.bf16_terms[which][n] + std::int64_t{block} * SplitTile::kBytes, SplitTile::kBytes, full);
  }

  // --- The consumer warpgroups ---------------------------------------------------------------------------------------

  __device__ __forceinline__ void compute() {
    Tile grad_k, grad_v;
    clear(grad_k);
    clear(grad_v);
    SplitTile& scores = shared_.ds[group()];
    const SplitTile& k = shared_.k[group()];
    const bool large_lse = *args_.terms.any_large_lse != 0;
    shared_.keys.wait(0);
    for (unsigned count = 0;; ++count) {
      const unsigned stage = count % 2;
      shared_.queries_full[stage].wait(count / 2 % 2);
      const auto tile = shared_.tile[stage];
      if (tile < 0) break;
      const auto visits = shared_.visits[stage] >> group();
      if (!(visits & 1)) {
        shared_.dout_full.wait(count % 2);  // so that it is not released twice in one phase
        release(shared_.dout_empty);
        release(shared_.queries_empty[stage]);
        continue;
      }
      Tile p, ds;
      {
        SplitSums s, dp;
        row_products(s, k, shared_.q[stage]);
        shared_.dout_full.wait(count % 2);
        row_products(dp, shared_.v[group()], shared_.dout);
        wgmma_wait<1>();
        join(p, s);
        weigh(p, shared_.lse[stage], lse_remainders_of(args_, large_lse, tile, 0),
              visits >> 8 & 1 ? shared_.words[stage][group()] : nullptr, args_.factor);
        wgmma_wait<0>();
        join(ds, dp);
      }
      score_gradients(ds, p, shared_.delta[stage], args_.has_dlse ? shared_.dlse[stage] : nullptr);
      sync_threads<128>(1 + group());  // the last tile's dS is no longer read
      SplitOperand<bf16_terms> weights;
      split_operand(weights, ds, 1.0f);
      store_operand(scores, weights);
      split_operand(weights, p, kSplitScale);
      fence_proxy_async();
      sync_threads<128>(1 + group());
      SplitSums sums;
      weighted_rows(sums, weights, shared_.dout);
      wgmma_wait<0>();
      release(shared_.dout_empty);
      add(grad_v, sums);
      tile_products<false>(sums, scores, shared_.q[stage]);
      wgmma_wait<0>();
      release(shared_.queries_empty[stage]);
      add(grad_k, sums);
      tile_products<true>(sums, scores, k);
      wgmma_wait<0>();
      Tile grad_q;
      join(grad_q, sums);
      add_to_sums(args_.sums + std::int64_t{tile} * 4096, grad_q);
    }
    const auto block = first_block_ + static_cast<std::int32_t>(group());
    store_gradient(grad_k, args_, b_, key_head_, block, 0, 0);
    store_gradient(grad_v, args_, b_, key_head_, block, 1, 0);
  }
};

}  // namespace anyflash::cuda
