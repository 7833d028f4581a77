// The backward pass on Hopper (sm_90a) for float64 and head sizes from 65 to 128; see also backward_double.cuh.
//
// A thread block takes one key block of a head, because there are no registers for both gradients of a warp's 16 keys.
// One warpgroup computes S^T, P^T and dV, the other dP^T, dS^T and dK, from 32 queries at a time. P^T is passed through
// shared memory, and dS^T replaces it there. All eight warps share dQ. Q and dO are loaded in halves of a tile; the
// first half of the next tile's Q is loaded early. Bound like backward_double.cuh.
#pragma once

#include "cuda/hopper/backward_double.cuh"

namespace anyflash::cuda {

struct WideDoubleBackwardShared {
  static constexpr int kDepth = 128, kHalf = 16;         ///< queries of half a tile
  static constexpr int kQuerySlots = 3, kDoutSlots = 2;  ///< slots in shared memory, in halves
  alignas(1024) double k[64 * kDepth];
  alignas(1024) double v[64 * kDepth];
  alignas(1024) double q[kQuerySlots][kHalf * kDepth];
  alignas(1024) double dout[kDoutSlots][kHalf * kDepth];
  alignas(1024) double scores[64 * 2 * kHalf];  ///< P^T, then dS^T, of a tile, in the fragments' order
  alignas(16) double lse[kQuerySlots][kHalf], delta[kDoutSlots][kHalf], dlse[kDoutSlots][kHalf];
  std::uint32_t words[kQuerySlots][64];  ///< of the tile, next to its first half
  std::int32_t tile[kQuerySlots];        ///< likewise: its number among those of all heads; -1 after the last
  bool partial[kQuerySlots];
  std::int32_t gradient_tile[kDoutSlots];  ///< the tile, for the warps that do not read q's slots
  Barrier keys, q_full[kQuerySlots], q_empty[kQuerySlots], dout_full[kDoutSlots], dout_empty[kDoutSlots];
  Barrier weights_stored, scores_stored, scores_done;  ///< for P^T or dS^T of a tile

  /// Called by one thread, before a barrier of the thread block.
  __device__ __forceinline__ void begin() {
    keys.begin(1);
    for (int i = 0; i < kQuerySlots; ++i) q_full[i].begin_for_warps(1), q_empty[i].begin_for_warps(8);
    for (int i = 0; i < kDoutSlots; ++i) dout_full[i].begin(1), dout_empty[i].begin_for_warps(8);
    weights_stored.begin_for_warps(4), scores_stored.begin_for_warps(4), scores_done.begin_for_warps(8);
    barriers_begun();
  }
};

template <class E>  // E is float64; a template so that other GPUs' builds compile no code for it
class WideDoubleBackwardBlock : public BackwardTask<DoubleBackwardArgs, WideDoubleBackwardShared, 1, 240, 24> {
 public:
  using BackwardTask::BackwardTask;
  static constexpr int kDepth = Shared::kDepth, kPanels = kDepth / 16, kHalf = Shared::kHalf;
  static constexpr int kQuerySlots = Shared::kQuerySlots, kDoutSlots = Shared::kDoutSlots;

  __device__ __forceinline__ void run() { load_and_compute(*this); }

 private:
  friend BackwardTask;

  using Scores = E[4][2][2];
  using Sums = E[kDepth / 8][2][2];

  // --- The producer warp ---------------------------------------------------------------------------------------------

  __device__ __forceinline__ void load() {
    const auto lane = static_cast<int>(lane_number());
    const auto& keys_side = args_.sides[keys];
    const auto& queries_side = args_.sides[queries];
    if (lane == 0) shared_.keys.arrive_and_expect(2 * 64 * kDepth * 8);
    __syncwarp();
    if (lane < 2 * kPanels) {
      const int n = lane / kPanels, panel = lane % kPanels;
      copy_box((n == 0 ? shared_.k : shared_.v) + panel * 64 * 16, &args_.maps[keys][n], panel * 16, first_block_ * 64,
               0, key_head_, b_, shared_.keys);
    }
    unsigned count = 0;  // of halves
    const auto h = key_head_ * args_.group_heads + args_.group_head;
    const auto& list = group_of(args_, b_, h).queries_of_key_block;
    MergedRuns<1, 1> runs;
    runs.open(list, first_block_, keys_side.blocks);
    for (;;) {
      std::int32_t at[1];
      const auto block = runs.find(at);
      if (block < 0) break;
      const auto n = __shfl_sync(0xffffffffu, at[0], 0);
      const bool partial = n < runs.hidden;
      Word words[2];
      if (partial) {
        const Word* const from = n < 0 ? args_.words + std::int64_t{~n} * 64 : list.words + std::int64_t{n} * 64;
        words[0] = from[lane], words[1] = from[lane + 32];
      }
      const auto first_half = ((b_ * queries_side.heads + h) * queries_side.blocks + block) * 4;
      const int halves = block * 64 + 32 < queries_side.grid.size[2] ? 4 : 2;  // whole tiles
#pragma unroll 1
      for (int half = 0; half < halves; ++half, ++count) {
        const unsigned slot = count % kQuerySlots, dout_slot = count % kDoutSlots;
        const auto row = block * 64 + half * kHalf;
        const auto number = std::int64_t{first_half + half} * kHalf;
        shared_.q_empty[slot].wait(count / kQuerySlots % 2 ^ 1);
        if (half % 2 == 0 && partial) {
          shared_.words[slot][lane] = static_cast<std::uint32_t>(words[0] >> half * kHalf);
          shared_.words[slot][lane + 32] = static_cast<std::uint32_t>(words[1] >> half * kHalf);
        }
        __syncwarp();
        if (lane == 0) shared_.tile[slot] = (first_half + half) / 2, shared_.partial[slot] = partial;
        shared_.q_full[slot].arrive_and_expect_for_warp((kDepth + 1) * kHalf * 8);
        __syncwarp();
        if (lane == 0) copy_bytes(shared_.lse[slot], args_.lse + number, kHalf * 8, shared_.q_full[slot]);
        if (lane < kPanels)
          copy_box(shared_.q[slot] + lane * kHalf * 16, &args_.maps[queries][0], lane * 16, row, 0, h, b_,
                   shared_.q_full[slot]);
        auto& full = shared_.dout_full[dout_slot];
        shared_.dout_empty[dout_slot].wait(count / kDoutSlots % 2 ^ 1);
        if (lane == 0) {
          shared_.gradient_tile[dout_slot] = (first_half + half) / 2;
          full.arrive_and_expect((kDepth + (args_.has_dlse ? 2 : 1)) * kHalf * 8);
          copy_bytes(shared_.delta[dout_slot], args_.delta + number, kHalf * 8, full);
          if (args_.has_dlse) copy_bytes(shared_.dlse[dout_slot], args_.dlse + number, kHalf * 8, full);
        }
        __syncwarp();
        if (lane < kPanels)
          copy_box(shared_.dout[dout_slot] + lane * kHalf * 16, &args_.maps[queries][1], lane * 16, row, 0, h, b_,
                   full);
      }
    }
    const unsigned slot = count % kQuerySlots, dout_slot = count % kDoutSlots;
    shared_.q_empty[slot].wait(count / kQuerySlots % 2 ^ 1);
    if (lane == 0) shared_.tile[slot] = -1;
    shared_.q_full[slot].arrive_for_warp();
    shared_.dout_empty[dout_slot].wait(count / kDoutSlots % 2 ^ 1);
    if (lane == 0) shared_.gradient_tile[dout_slot] = -1, shared_.dout_full[dout_slot].arrive();
  }

  // --- The consumer warpgroups ---------------------------------------------------------------------------------------

  /// The slots of a tile's halves. count: of halves so far.
  template <int kStages>
  struct Slots {
    unsigned of[2], parity[2];
    __device__ __forceinline__ explicit Slots(unsigned count) {
#pragma unroll
      for (unsigned n = 0; n < 2; ++n) of[n] = (count + n) % kStages, parity[n] = (count + n) / kStages % 2;
    }
  };
  using Query = Slots<kQuerySlots>;
  using Dout = Slots<kDoutSlots>;

  __device__ __forceinline__ void compute() { threadIdx.x < 128 ? weigh() : differentiate(); }

  /// S^T, P^T, dV.
  __device__ __forceinline__ void weigh() {
    Sums sum;
    clear_fragments(sum);
    const bool large_lse = *args_.terms.any_large_lse != 0;
    shared_.keys.wait(0);
    for (unsigned count = 0;; count += 2) {
      const Query query(count);
      const Dout dout(count);
      shared_.q_full[query.of[0]].wait(query.parity[0]);
      const auto tile = shared_.tile[query.of[0]];
      if (tile < 0) break;
      shared_.q_full[query.of[1]].wait(query.parity[1]);
      Scores p;
      row_products<kPanels, 1>(p, shared_.k, shared_.q[query.of[0]], shared_.q[query.of[1]]);
      const E* const rest = large_lse ? lse_remainders_of(args_, tile) : nullptr;
      weigh_scores(p, args_.scale, OfQueries<E>{shared_.lse[query.of[0]], shared_.lse[query.of[1]]},
                   OfQueries<E>{rest, rest + 16});
      if (shared_.partial[query.of[0]]) hide_pairs(p, shared_.words[query.of[0]]);
#pragma unroll
      for (int n = 0; n < 2; ++n) release(shared_.q_empty[query.of[n]]);
      shared_.scores_done.wait(count / 2 % 2 ^ 1);  // of the tile before
      store_scores(shared_.scores, p);
      release(shared_.weights_stored);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        shared_.dout_full[dout.of[n]].wait(dout.parity[n]);
        column_products<kPanels>(sum, p, 2 * n, shared_.dout[dout.of[n]]);
        release(shared_.dout_empty[dout.of[n]]);
      }
      share_out(tile, count);
    }
    store_key_gradient<kKeyBlocks>(sum, args_, b_, key_head_, first_block_, 1, 1.0);
  }

  /// dP^T, dS^T, dK.
  __device__ __forceinline__ void differentiate() {
    Sums sum;
    clear_fragments(sum);
    shared_.keys.wait(0);
    for (unsigned count = 0;; count += 2) {
      const Query query(count);
      const Dout dout(count);
      shared_.dout_full[dout.of[0]].wait(dout.parity[0]);
      const auto tile = shared_.gradient_tile[dout.of[0]];
      if (tile < 0) break;
      shared_.dout_full[dout.of[1]].wait(dout.parity[1]);
      Scores x;
      row_products<kPanels, 1>(x, shared_.v, shared_.dout[dout.of[0]], shared_.dout[dout.of[1]]);
      shared_.weights_stored.wait(count / 2 % 2);
      {
        Scores p;
        read_scores(p, shared_.scores);
        const bool given = args_.has_dlse;
        score_gradients(x, p, OfQueries<E>{shared_.delta[dout.of[0]], shared_.delta[dout.of[1]]},
                        OfQueries<E>{given ? shared_.dlse[dout.of[0]] : nullptr, shared_.dlse[dout.of[1]]});
      }
      store_scores(shared_.scores, x);
      release(shared_.scores_stored);
#pragma unroll
      for (int n = 0; n < 2; ++n) release(shared_.dout_empty[dout.of[n]]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        shared_.q_full[query.of[n]].wait(query.parity[n]);
        column_products<kPanels>(sum, x, 2 * n, shared_.q[query.of[n]]);
        release(shared_.q_empty[query.of[n]]);
      }
      share_out(tile, count);
    }
    store_key_gradient<kKeyBlocks>(sum, args_, b_, key_head_, first_block_, 0, args_.scale);
  }

  /// Computes this warp's part of a tile's dQ.
  __device__ __forceinline__ void share_out(std::int32_t tile, unsigned count) {
    shared_.scores_stored.wait(count / 2 % 2);
    add_query_gradient(args_.sums + std::int64_t{tile} * (32 * kDepth), shared_.scores, shared_.k, threadIdx.x / 32);
    release(shared_.scores_done);
  }
};

}  // namespace anyflash::cuda
