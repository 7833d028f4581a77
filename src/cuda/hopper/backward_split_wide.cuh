// The backward pass on Hopper (sm_90a) for split-bfloat16 float32 (common/split_bf16.cuh) and head sizes up to 128.
// backward.cuh describes the algorithm, backward_split.cuh the kernel for up to 64 channels.
//
// A thread block takes one key block of a head and walks the query blocks that see it. Two warpgroups divide the
// products: one computes S^T, P^T and dV, the other dP^T, dS^T and dK. So each has one gradient of 64 keys and 128
// channels in registers, with the operand of its products. P^T is passed from one to the other through shared memory.
// dS^T follows in the same place as bfloat16 terms. Each warpgroup computes 64 channels of dQ = dS K, which are added
// to float32 sums in global memory, in no fixed order, during the next tile's first products. While one warpgroup
// computes P^T, or dS^T, the other has the tensor cores to itself.
//
// Shared memory holds K, V and one tile of Q and dO, in halves of 64 channels. Each half has its own barriers: the next
// tile's is loaded as soon as both warpgroups have read this one. Bound by the tensor cores, six products for one
// (three with two terms), and by the additions to dQ's sums.
#pragma once

#include "cuda/hopper/backward_split.cuh"

namespace anyflash::cuda {

/// An index n below means: 0: K and Q, which give S; 1: V and dO, which give dP.
template <int bf16_terms>
struct WideSplitBackwardShared {
  using SplitTile = cuda::SplitTile<bf16_terms>;
  SplitTile keys[2][2], rows[2][2];  ///< [n][half of the channels]
  union {
    float weights[8][128][4];  ///< P^T, in the order of a warpgroup's registers
    SplitTile ds;              ///< dS^T
  };
  alignas(16) float lse[64], delta[64], dlse[64];
  Word words[64];
  std::int32_t tile[2];  ///< its query block among those of all heads; -1 after the last
  bool partial;          ///< some of the tile's pairs are hidden
  Barrier keys_full[2], rows_full[2][2], rows_empty[2][2], weights_full, ds_full, ds_empty;

  /// Called by one thread, before a barrier of the thread block.
  __device__ __forceinline__ void begin() {
    for (int n = 0; n < 2; ++n) {
      keys_full[n].begin(1);
      for (int half = 0; half < 2; ++half) rows_full[n][half].begin(1), rows_empty[n][half].begin_for_warps(8);
    }
    weights_full.begin_for_warps(4), ds_full.begin_for_warps(4), ds_empty.begin_for_warps(8);
    barriers_begun();
  }
};

template <int bf16_terms>  // bfloat16 terms of a number
class WideSplitBackwardBlock : public BackwardTask<GroupBackwardArgs, WideSplitBackwardShared<bf16_terms>, 1, 232, 40> {
 public:
  using Task = BackwardTask<GroupBackwardArgs, WideSplitBackwardShared<bf16_terms>, 1, 232, 40>;
  using Task::Task;

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) shared_.begin();
    __syncthreads();
    const auto warp = uniform(threadIdx.x / 32);
    if (warp >= 8) {
      setmaxnreg_dec<Task::kLoaderRegisters>();
      if (warp < 10) load(warp - 8);
    } else {
      setmaxnreg_inc<Task::kRegisters>();
      compute(warp / 4);
    }
  }

 private:
  using Task::args_, Task::shared_, Task::b_, Task::key_head_, Task::first_block_;
  using SplitTile = cuda::SplitTile<bf16_terms>;
  using Tile = SplitSums::Tile;

  // --- The producer warps, one for each n ----------------------------------------------------------------------------

  __device__ __forceinline__ void load(unsigned n) {
    const bool leads = lane_number() == 0;
    const auto& keys_side = args_.sides[keys];
    if (leads) {
      const auto block = (b_ * keys_side.heads + key_head_) * keys_side.blocks + first_block_;
      shared_.keys_full[n].arrive_and_expect(2 * SplitTile::kBytes);
      for (int half = 0; half < 2; ++half)
        copy(shared_.keys[n][half], args_.bf16_terms[keys][n], block, half, shared_.keys_full[n]);
    }
    unsigned parity = 1;
    for (auto h = key_head_ * args_.group_heads; h < (key_head_ + 1) * args_.group_heads; ++h) {
      const auto& list = group_of(args_, b_, h).queries_of_key_block;
      MergedRuns<1, 1> runs;
      runs.open(list, first_block_, keys_side.blocks);
      for (;; parity ^= 1) {
        std::int32_t words[1];
        const auto block = runs.find(words);
        if (block < 0) break;
        if (!leads) continue;
        const auto tile = (b_ * args_.sides[queries].heads + h) * args_.sides[queries].blocks + block;
        for (int half = 0; half < 2; ++half) {
          auto& full = shared_.rows_full[n][half];
          shared_.rows_empty[n][half].wait(parity);
          if (half == 0) {
            shared_.tile[n] = tile;
            if (n == 0) shared_.partial = is_partial(words[0]);
          }
          full.arrive_and_expect(SplitTile::kBytes + (half == 0 ? numbers_bytes(n, words[0]) : 0));
          copy(shared_.rows[n][half], args_.bf16_terms[queries][n], tile, half, full);
          if (half == 0) load_numbers(n, list, tile, words[0], full);
        }
      }
    }
    if (!leads) return;
    shared_.rows_empty[n][0].wait(parity);
    shared_.tile[n] = -1, shared_.rows_full[n][0].arrive();
  }

  /// block: its number among those of all heads, an image of all channels (split_bf16.h).
  __device__ __forceinline__ static void copy(SplitTile& to, const char* images, std::int32_t block, int half,
                                              Barrier& full) {
    constexpr int kBytes = SplitTile::kTermBytes;
    const char* const from = images + std::int64_t{block} * (2 * SplitTile::kBytes) + half * kBytes;
#pragma unroll
    for (int n = 0; n < bf16_terms; ++n)
      copy_bytes(to.numbers + n * SplitTile::kNumbers, from + 2 * n * kBytes, kBytes, full);
  }

  /// words: as MergedRuns finds them.
  __device__ __forceinline__ static bool is_partial(std::int32_t words) { return words < MergedRuns<1, 1>::hidden; }
  __device__ __forceinline__ int numbers_bytes(unsigned n, std::int32_t words) const {
    return n == 0 ? 256 + is_partial(words) * 512 : (args_.has_dlse ? 2 : 1) * 256;
  }
  __device__ __forceinline__ void load_numbers(unsigned n, const DeviceRuns& list, std::int32_t tile,
                                               std::int32_t words, Barrier& full) {
    const auto first = std::int64_t{tile} * 64;
    if (n == 0) {
      copy_bytes(shared_.lse, args_.lse + first, 256, full);
      if (is_partial(words))
        copy_bytes(shared_.words,
                   words < 0 ? args_.words + std::int64_t{~words} * 64 : list.words + std::int64_t{words} * 64, 512,
                   full);
    } else {
      copy_bytes(shared_.delta, args_.delta + first, 256, full);
      if (args_.has_dlse) copy_bytes(shared_.dlse, args_.dlse + first, 256, full);
    }
  }

  // --- The consumer warpgroups, one for each n -----------------------------------------------------------------------

  __device__ __forceinline__ void compute(unsigned n) {
    const unsigned other = n ^ 1;
    Tile gradient[2], query_gradient;  // n 0: dV, 1: dK; 64 channels of dQ of the last tile
    clear(gradient[0]);
    clear(gradient[1]);
    std::int32_t last_tile = -1;
    const bool large_lse = *args_.terms.any_large_lse != 0;
    shared_.keys_full[n].wait(0);
    shared_.keys_full[0].wait(0);  // dQ needs K
    for (unsigned parity = 0;; parity ^= 1) {
      shared_.rows_full[n][0].wait(parity);
      const auto tile = uniform(shared_.tile[n]);
      if (tile < 0) break;
      Tile x;
      score_products(x, n, parity, [&] { add_query_gradient(query_gradient, last_tile, n); });
      last_tile = tile;
      SplitOperand<bf16_terms> weights;
      if (n == 0) {
        weigh(x, shared_.lse, lse_remainders_of(args_, large_lse, tile, 0), shared_.partial ? shared_.words : nullptr,
              args_.factor);
        shared_.ds_empty.wait(parity ^ 1);
        show_weights(x);
        split_operand(weights, x, kSplitScale);
      } else {
        differences(x, shared_.delta, args_.has_dlse ? shared_.dlse : nullptr);
        shared_.weights_full.wait(parity);
        times_weights(x);
        split_operand(weights, x, 1.0f);
        sync_threads<128>(1);  // all threads have read P
        store_operand(shared_.ds, weights);
        fence_proxy_async();
        release(shared_.ds_full);
      }
      release(shared_.rows_empty[n][0]);
      release(shared_.rows_empty[n][1]);
      SplitSums sums;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shared_.rows_full[other][half].wait(parity);
        weighted_rows(sums, weights, shared_.rows[other][half]);
        wgmma_wait<0>();
        release(shared_.rows_empty[other][half]);
        add(gradient[half], sums);
      }
      shared_.ds_full.wait(parity);
      tile_products<true>(sums, shared_.ds, shared_.keys[0][n]);
      wgmma_wait<0>();
      release(shared_.ds_empty);
      join(query_gradient, sums);
    }
    add_query_gradient(query_gradient, last_tile, n);
    store_gradient(gradient[0], args_, b_, key_head_, first_block_, other, 0);
    store_gradient(gradient[1], args_, b_, key_head_, first_block_, other, 64);
  }

  /// S^T or dP^T. A chain of products for each half, to the bit as in the forward pass. meanwhile(): runs during the
  /// first products.
  template <class Work>
  __device__ __forceinline__ void score_products(Tile& x, unsigned n, unsigned parity, const Work& meanwhile) {
    SplitSums first, second;
    row_products(first, shared_.keys[n][0], shared_.rows[n][0]);
    meanwhile();
    shared_.rows_full[n][1].wait(parity);
    row_products(second, shared_.keys[n][1], shared_.rows[n][1]);
    wgmma_wait<1>();
    join(x, first);
    wgmma_wait<0>();
    add(x, second);
  }

  /// tile -1: there is no last tile.
  __device__ __forceinline__ void add_query_gradient(const Tile& x, std::int32_t tile, unsigned n) const {
    if (tile >= 0) add_to_sums(args_.sums + std::int64_t{tile} * 8192 + n * 4096, x);
  }

  __device__ __forceinline__ void show_weights(const Tile& p) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      *reinterpret_cast<float4*>(shared_.weights[j][threadIdx.x % 128]) =
          make_float4(p[j][0], p[j][1], p[j][2], p[j][3]);
    release(shared_.weights_full);
  }
  __device__ __forceinline__ void times_weights(Tile& x) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 p = *reinterpret_cast<const float4*>(shared_.weights[j][threadIdx.x % 128]);
      x[j][0] *= p.x, x[j][1] *= p.y, x[j][2] *= p.z, x[j][3] *= p.w;
    }
  }
};

}  // namespace anyflash::cuda
