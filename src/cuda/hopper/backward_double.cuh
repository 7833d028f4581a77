// The backward pass on Hopper (sm_90a) for float64 and head sizes up to 64; backward.cuh describes the algorithm.
//
// A thread block takes two neighbouring key blocks of a head. Each of two warpgroups owns one key block and walks the
// query blocks that see it on its own, 32 queries at a time. It computes all of S^T, dP^T, dV, dK, and its part of dQ,
// which is added to sums in global memory, in no fixed order. P^T and dS^T are operands from registers; dS^T also goes
// through shared memory, since dQ needs it transposed. One warp loads, two query tiles ahead. The warpgroups alternate
// at S. Otherwise they fall into step, and the tensor cores idle while both compute exponentials.
//
// Bound by the tensor cores, 64 cycles for a 16 x 8 x 16 product, and by other float64 arithmetic, which shares their
// time. Operands use two thirds of the shared memory bandwidth.
#pragma once

#include "cuda/hopper/backward_args.h"
#include "cuda/hopper/backward_double_products.cuh"
#include "cuda/hopper/backward_task.cuh"

namespace anyflash::cuda {

struct DoubleBackwardShared {
  static constexpr int kQueries = 32, kHalf = 16 * 64;  ///< of a tile; numbers of half a tile
  alignas(1024) double k[2][64 * 64];
  alignas(1024) double v[2][64 * 64];
  alignas(1024) double q[2][2][kHalf];
  alignas(1024) double dout[2][2][kHalf];
  alignas(1024) double ds[2][64 * kQueries];  ///< dS^T of each warpgroup
  alignas(16) double lse[2][kQueries], delta[2][kQueries], dlse[2][kQueries];
  std::uint32_t words[2][2][64];  ///< by stage and warpgroup
  std::int32_t tile[2];           ///< its number among those of all heads; -1 after the last
  std::uint32_t visits[2];        ///< bit w: warpgroup w's keys are visible; 8 + w: not all pairs are
  Barrier keys, full[2], empty[2];

  /// Called by one thread, before a barrier of the thread block.
  __device__ __forceinline__ void begin() {
    keys.begin(1);
    for (int i = 0; i < 2; ++i) full[i].begin_for_warps(1), empty[i].begin_for_warps(8);
    barriers_begun();
  }
};

/// The lse remainders of a tile's queries, in global memory, since they are rarely needed.
__device__ __forceinline__ const double* lse_remainders_of(const DoubleBackwardArgs& args, std::int32_t tile) {
  return static_cast<const double*>(args.terms.rest) + std::int64_t{tile} * 32;
}

/// Stores this warp's rows of dK (n = 0) or dV. kKeyBlocks: of the thread block; all but the first may not exist.
template <int kKeyBlocks, class E, int kTiles>
__device__ __forceinline__ void store_key_gradient(const E (&x)[kTiles][2][2], const DoubleBackwardArgs& args,
                                                   std::int32_t b, std::int32_t key_head, std::int32_t block, int n,
                                                   double factor) {
  const auto& side = args.sides[keys];
  if (!side.gradients[n].data || (kKeyBlocks > 1 && block >= side.blocks)) return;
  const int rows[2] = {static_cast<int>(own_row()), static_cast<int>(own_row() + 8)};
  store_double_rows(x, side.gradients[n], head_data<double>(side.gradients[n], b, key_head), 0, args.channels[n],
                    box_of(side.grid, side.plain, block), side.grid.size, rows, factor, args.group_head > 0,
                    args.not_finite);
}

template <class E>  // E is float64; a template so that other GPUs' builds compile no code for it
class DoubleBackwardBlock : public BackwardTask<DoubleBackwardArgs, DoubleBackwardShared, 2, 240, 24> {
 public:
  using BackwardTask::BackwardTask;
  static constexpr int kQueries = Shared::kQueries;

  __device__ __forceinline__ void run() { load_and_compute(*this); }

 private:
  friend BackwardTask;

  /// Named barriers, two of each: a warpgroup's dS, and its turn to compute S.
  enum NamedBarrier : unsigned { scores = 1, turn = 3 };

  __device__ __forceinline__ static unsigned group() { return threadIdx.x / 128; }

  // --- The producer warp ---------------------------------------------------------------------------------------------

  __device__ __forceinline__ void load() {
    const auto lane = static_cast<int>(lane_number());
    const auto& keys_side = args_.sides[keys];
    if (lane == 0) shared_.keys.arrive_and_expect(4 * 64 * 64 * 8);
    __syncwarp();
    if (lane < 16) {
      const int n = lane / 4 % 2, w = lane / 8, panel = lane % 4;
      copy_box((n == 0 ? shared_.k : shared_.v)[w] + panel * 64 * 16, &args_.maps[keys][n], panel * 16,
               (first_block_ + w) * 64, 0, key_head_, b_, shared_.keys);
    }
    unsigned count = 0;
    const auto h = key_head_ * args_.group_heads + args_.group_head;
    const auto& list = group_of(args_, b_, h).queries_of_key_block;
    MergedRuns<2, 1> runs;
    runs.open(list, first_block_, keys_side.blocks);
    for (;;) {
      std::int32_t at[1];
      const auto block = runs.find(at);
      if (block < 0) break;
      const auto seen = __ballot_sync(0xffffffffu, at[0] != runs.hidden);
      const auto partial = __ballot_sync(0xffffffffu, at[0] < runs.hidden);
      Word words[2][2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        if (!(partial >> w & 1)) continue;
        const auto n = __shfl_sync(0xffffffffu, at[0], w);
        const Word* const from = n < 0 ? args_.words + std::int64_t{~n} * 64 : list.words + std::int64_t{n} * 64;
        words[w][0] = from[lane], words[w][1] = from[lane + 32];
      }
      const auto tile = ((b_ * args_.sides[queries].heads + h) * args_.sides[queries].blocks + block) * 2;
#pragma unroll 1
      for (int half = 0; half < 2 && block * 64 + half * kQueries < args_.sides[queries].grid.size[2];
           ++half, ++count) {
        const unsigned stage = count % 2;
        auto& full = shared_.full[stage];
        shared_.empty[stage].wait(count / 2 % 2 ^ 1);
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          if (!(partial >> w & 1)) continue;
#pragma unroll
          for (int n = 0; n < 2; ++n)
            shared_.words[stage][w][lane + 32 * n] = static_cast<std::uint32_t>(words[w][n] >> half * kQueries);
        }
        __syncwarp();
        if (lane == 0) shared_.tile[stage] = tile + half, shared_.visits[stage] = seen | partial << 8;
        full.arrive_and_expect_for_warp((2 * 64 + (args_.has_dlse ? 3 : 2)) * kQueries * 8);
        __syncwarp();
        if (const int n = lane - 16; n < 0) {
          const int part = lane / 4 % 2, panel = lane % 4;
          copy_box((lane < 8 ? shared_.q : shared_.dout)[stage][part] + panel * 256, &args_.maps[queries][lane / 8],
                   panel * 16, block * 64 + half * kQueries + part * 16, 0, h, b_, full);
        } else if (n < (args_.has_dlse ? 3 : 2)) {
          copy_bytes(n == 0   ? shared_.lse[stage]
                     : n == 1 ? shared_.delta[stage]
                              : shared_.dlse[stage],
                     (n == 0   ? args_.lse
                      : n == 1 ? args_.delta
                               : args_.dlse) +
                         std::int64_t{tile + half} * kQueries,
                     kQueries * 8, full);
        }
      }
    }
    shared_.empty[count % 2].wait(count / 2 % 2 ^ 1);
    if (lane == 0) shared_.tile[count % 2] = -1;
    shared_.full[count % 2].arrive_for_warp();
  }

  // --- The consumer warpgroups ---------------------------------------------------------------------------------------

  __device__ __forceinline__ void compute() {
    E grad_k[8][2][2], grad_v[8][2][2];
    clear_fragments(grad_k), clear_fragments(grad_v);
    const bool large_lse = *args_.terms.any_large_lse != 0;
    shared_.keys.wait(0);
    if (group() == 1) arrive_threads<256>(turn);
    for (unsigned count = 0;; ++count) {
      const unsigned stage = count % 2;
      shared_.full[stage].wait(count / 2 % 2);
      const auto tile = shared_.tile[stage];
      if (tile < 0) break;
      const auto visits = shared_.visits[stage] >> group();
      sync_threads<256>(turn + group());
      if (!(visits & 1)) {
        arrive_threads<256>(turn + 1 - group());
        release(shared_.empty[stage]);
        continue;
      }
      const E(&q)[2][Shared::kHalf] = shared_.q[stage];
      const E(&dout)[2][Shared::kHalf] = shared_.dout[stage];
      const auto of_queries = [](const E* numbers) { return OfQueries<E>{numbers, numbers ? numbers + 16 : nullptr}; };
      E p[4][2][2], ds[4][2][2];
      row_products<4, 4>(p, shared_.k[group()], q[0], q[1]);
      arrive_threads<256>(turn + 1 - group());
      weigh_scores(p, args_.scale, of_queries(shared_.lse[stage]),
                   of_queries(large_lse ? lse_remainders_of(args_, tile) : nullptr));
      if (visits >> 8 & 1) hide_pairs(p, shared_.words[stage][group()]);
      column_products<4>(grad_v, p, 0, dout[0]);
      column_products<4>(grad_v, p, 2, dout[1]);
      row_products<4, 4>(ds, shared_.v[group()], dout[0], dout[1]);
      score_gradients(ds, p, of_queries(shared_.delta[stage]),
                      of_queries(args_.has_dlse ? shared_.dlse[stage] : nullptr));
      sync_threads<128>(scores + group());  // the last tile's dS is no longer read
      store_scores(shared_.ds[group()], ds);
      column_products<4>(grad_k, ds, 0, q[0]);
      column_products<4>(grad_k, ds, 2, q[1]);
      release(shared_.empty[stage]);
      sync_threads<128>(scores + group());
      add_query_gradient(args_.sums + std::int64_t{tile} * (kQueries * 64), shared_.ds[group()], shared_.k[group()],
                         threadIdx.x / 32 % 4);
    }
    const auto block = first_block_ + static_cast<std::int32_t>(group());
    store_key_gradient<kKeyBlocks>(grad_k, args_, b_, key_head_, block, 0, args_.scale);
    store_key_gradient<kKeyBlocks>(grad_v, args_, b_, key_head_, block, 1, 1.0);
  }
};

/// Prepares the kernel's row terms from the portable kernel's, and zeroes dQ's sums. One block of 128 threads for each
/// query block of each head.
template <int kDepth>
__global__ void __launch_bounds__(128) prepare_double_rows(const __grid_constant__ DoubleBackwardArgs args) {
  auto* const sums = reinterpret_cast<double2*>(args.sums + blockIdx.x * std::int64_t{64 * kDepth});
#pragma unroll
  for (int j = 0; j < kDepth / 4; ++j) sums[j * 128 + threadIdx.x] = double2{0, 0};
  if (threadIdx.x >= 64) return;
  const auto at = blockIdx.x * std::int64_t{64} + threadIdx.x;
  const bool live = args.terms.live[blockIdx.x] >> threadIdx.x & 1;
  const auto of = [&](const void* numbers) { return static_cast<const double*>(numbers)[at]; };
  args.lse[at] = live ? of(args.terms.lse) : __longlong_as_double(0x7ff0000000000000ll);
  args.delta[at] = live ? of(args.terms.delta) : 0.0;
  args.dlse[at] = live ? of(args.terms.dlse) : 0.0;
}

/// dQ from its sums. One thread block for each query block of each head, one warp for each part of a tile's sums.
template <int kDepth>
__global__ void __launch_bounds__(4 * kDepth)
    store_double_query_gradients(const __grid_constant__ DoubleBackwardArgs args) {
  constexpr unsigned kParts = kDepth / 16;
  const unsigned warp = threadIdx.x / 32, part = warp % kParts;
  const double* const sums = args.sums + blockIdx.x * std::int64_t{64 * kDepth} + warp * 512 + lane_number();
  double x[4][2][2];
#pragma unroll
  for (int n = 0; n < 16; ++n) x[n / 4][n / 2 % 2][n % 2] = sums[n * 32];
  const auto& side = args.sides[queries];
  const auto& rows = side.gradients[0];
  const auto block = static_cast<std::int32_t>(blockIdx.x) % side.blocks;
  const auto head = static_cast<std::int32_t>(blockIdx.x) / side.blocks;
  int row[2];
#pragma unroll
  for (unsigned r = 0; r < 2; ++r) row[r] = static_cast<int>(warp / kParts * 32 + query_row(part, r));
  store_double_rows(x, rows, head_data<double>(rows, head / side.heads, head % side.heads),
                    static_cast<int>(part / 2 * 32), args.channels[0], box_of(side.grid, side.plain, block),
                    side.grid.size, row, args.scale, false, args.not_finite);
}

}  // namespace anyflash::cuda
