// What blocks of threads of Hopper's backward kernel have in shared memory, and the warpgroup that serves the others.
// It walks the runs of neighbouring key blocks at once; one warp has the copy engine load K and V once, then Q, dO and
// the numbers of their rows, tile by tile. One warp shows the scores that the other warpgroups have written: who does
// that waits for all that it has asked of memory; those who add to dQ's sums could not afford it. Two warps have the
// copy engine add to the sums.
#pragma once

#include "cuda/hopper/backward_args.h"
#include "cuda/hopper/instructions.cuh"
#include "cuda/hopper/tiles.cuh"
#include "cuda/portable/backward_shared.cuh"

namespace anyflash::cuda {

/// general: scores need more than a scale.
template <class E, int depth, int queries, bool general>
struct GroupBackwardSizes {
  using Element = E;
  static constexpr bool kGeneral = general;
  static constexpr int kDepth = depth, kQueries = queries, kKeys = 128;
  static constexpr int kCells = queries / 64;  ///< query blocks of a tile
  static constexpr int kStages = 2, kScoreBuffers = 3, kThreads = 3 * 128;
  static constexpr bool kSpare = depth == 64 && !general;  ///< registers, for the warps that load
  static constexpr int kRegisters = kSpare ? 232 : 240, kLoaderRegisters = kSpare ? 40 : 24;
  static constexpr int kScores = kQueries * kKeys;  ///< numbers of a buffer: dS
  static constexpr bool kStaged = depth > 64;       ///< dQ is added from shared memory
  static_assert(kCells * (depth / 64) == 2, "each of two warpgroups makes one 64 x 64 part of dQ");
};

/// Of head sizes up to 256.
template <class E, bool general>
struct WideBackwardSizes {
  using Element = E;
  static constexpr bool kGeneral = general;
  static constexpr int kDepth = 256, kQueries = 64, kKeys = 64, kCells = 1;
  static constexpr int kStages = 2, kScoreBuffers = 2, kThreads = 3 * 128;
  static constexpr int kRegisters = 240, kLoaderRegisters = 24;
  static constexpr int kScores = 2 * kQueries * kKeys;  ///< P, then dS
  static constexpr bool kStaged = false;
};

template <class Sizes>
struct GroupBackwardShared {
  using E = typename Sizes::Element;
  static constexpr int kStages = Sizes::kStages, kScoreBuffers = Sizes::kScoreBuffers;
  static constexpr int kBlocks = Sizes::kKeys / 64;  ///< key blocks
  static constexpr bool kStaged = Sizes::kStaged;
  alignas(1024) E k[Sizes::kKeys * Sizes::kDepth];
  alignas(1024) E v[Sizes::kKeys * Sizes::kDepth];
  alignas(1024) E q[kStages][Sizes::kQueries * Sizes::kDepth];
  alignas(1024) E dout[kStages][Sizes::kQueries * Sizes::kDepth];
  alignas(1024) E scores[kScoreBuffers][Sizes::kScores];  ///< dS^T or P^T: panels of 64 queries
  // P = exp(S - lse), dS = P (dP - delta + dlse); inf, 0 and 0 of a row that has no gradient.
  float lse[kStages][Sizes::kQueries], delta[kStages][Sizes::kQueries], dlse[kStages][Sizes::kQueries];
  Word words[kStages][Sizes::kCells][Sizes::kKeys];
  std::int32_t tile[kStages];  ///< its first query block among those of all heads, -1 behind the last
  /// Bit c: query block c is visited; 8 + 2c + w: it hides some pairs from key block w, 16 + 2c + w: all.
  std::uint32_t cells[kStages];
  alignas(kStaged ? 1024 : 16) float sums[2][kStaged ? 4096 : 1];  ///< parts of dQ, of each warpgroup
  std::int32_t sums_tile[2];                                       ///< whose they are, -1 behind the last
  Barrier sums_written[2], sums_empty[2];
  bool done;  ///< no more scores will be written
  Barrier keys, full[kStages], empty[kStages];
  // Written: in shared memory. Full: shown to the products too.
  Barrier scores_written[kScoreBuffers], scores_full[kScoreBuffers], scores_empty[kScoreBuffers];

  /// One thread's work, before a barrier of the block.
  __device__ __forceinline__ void begin() {
    done = false;
    keys.begin(1);
    for (int i = 0; i < kStages; ++i) full[i].begin(1), empty[i].begin(8);
    for (int i = 0; i < kScoreBuffers; ++i)
      scores_written[i].begin(8), scores_full[i].begin(1), scores_empty[i].begin(8);
    for (int i = 0; i < 2; ++i) sums_written[i].begin(4), sums_empty[i].begin(1);
    barriers_begun();
  }
};

template <class Sizes>
class GroupLoader {
 public:
  using E = typename Sizes::Element;
  using Shared = GroupBackwardShared<Sizes>;
  static constexpr int kBlocks = Shared::kBlocks;
  using Runs = MergedRuns<kBlocks, Sizes::kCells>;
  static constexpr int kDepth = Sizes::kDepth, kQueries = Sizes::kQueries, kKeys = Sizes::kKeys;
  static constexpr int kStages = Sizes::kStages, kCells = Sizes::kCells;

  /// first_block: of the kBlocks key blocks, of a key head.
  __device__ __forceinline__ GroupLoader(const GroupBackwardArgs& args, Shared& shared, std::int32_t b,
                                         std::int32_t key_head, std::int32_t first_block)
      : args_(args), shared_(shared), b_(b), key_head_(key_head), first_block_(first_block) {}

  __device__ __forceinline__ void run() {
    const int warp = static_cast<int>(threadIdx.x % 128 / 32);
    if (warp == 0) copy();
    if (warp == 3) show_scores();
    if (Sizes::kStaged && (warp == 1 || warp == 2)) add_sums(warp - 1);
  }

 private:
  __device__ __forceinline__ void copy() {
    constexpr int kRowBytes = kDepth * int(sizeof(E));
    const bool leads = lane_number() == 0;
    if (leads) {
      shared_.keys.arrive_and_expect(2 * kKeys * kRowBytes);
      copy_tile<kKeys>(shared_.k, keys, 0, key_head_, first_block_, shared_.keys);
      copy_tile<kKeys>(shared_.v, keys, 1, key_head_, first_block_, shared_.keys);
    }
    int count = 0;
    for (auto h = key_head_ * args_.group_heads; h < (key_head_ + 1) * args_.group_heads; ++h) {
      const auto& list = group_of(args_, b_, h).queries_of_key_block;
      Runs runs;
      runs.open(list, first_block_, args_.sides[keys].blocks);
      for (;; ++count) {
        std::int32_t words[kCells];
        const auto block = runs.find(words);
        if (block < 0) break;
        const int stage = count % kStages;
        auto& full = shared_.full[stage];
        const auto first = (b_ * args_.sides[queries].heads + h) * args_.sides[queries].blocks + block;
        const auto cells = cells_of(words);
        shared_.empty[stage].wait(count / kStages % 2 ^ 1);
        if (leads) {
          const int rows = min(kCells, args_.sides[queries].blocks - block) * 64;  // that have numbers
          shared_.tile[stage] = first, shared_.cells[stage] = cells;
          full.arrive_and_expect(2 * kQueries * kRowBytes + (args_.has_dlse ? 3 : 2) * rows * 4 +
                                 __popc((cells >> 8 & ~(cells >> 16)) & 255) * 512);
          copy_tile<kQueries>(shared_.q[stage], queries, 0, h, block, full);
          copy_tile<kQueries>(shared_.dout[stage], queries, 1, h, block, full);
          copy_bytes(shared_.lse[stage], args_.lse + std::int64_t{first} * 64, rows * 4, full);
          copy_bytes(shared_.delta[stage], args_.delta + std::int64_t{first} * 64, rows * 4, full);
          if (args_.has_dlse) copy_bytes(shared_.dlse[stage], args_.dlse + std::int64_t{first} * 64, rows * 4, full);
        }
        __syncwarp();
#pragma unroll
        for (int cell = 0; cell < kCells; ++cell)
          if (const auto at = words[cell]; at < Runs::hidden)
            copy_bytes(&shared_.words[stage][cell][lane_number() * 64],
                       at < 0 ? args_.words + std::int64_t{~at} * 64 : list.words + std::int64_t{at} * 64, 512, full);
      }
    }
    const int stage = count % kStages;
    shared_.empty[stage].wait(count / kStages % 2 ^ 1);
    if (leads) shared_.tile[stage] = -1, shared_.full[stage].arrive();
  }

  /// kRows rows of neighbouring blocks, zeros where there are none.
  template <int kRows>
  __device__ __forceinline__ void copy_tile(E* to, Side which, int n, std::int32_t h, std::int32_t block,
                                            Barrier& barrier) const {
#pragma unroll
    for (int row = 0; row < kRows; row += 64) {
      const auto origin = origin_of(args_.cuts[which], block + row / 64);
#pragma unroll
      for (int c = 0; c < kDepth; c += 64)
        copy_rows(to + c * kRows + row * 64, args_.maps[which][n], c, origin, h, b_, barrier);
    }
  }

  __device__ __forceinline__ void show_scores() {
    int buffer = 0;
    for (unsigned parity = 0;; parity ^= buffer == 0) {
      shared_.scores_written[buffer].wait(parity);
      if (shared_.done) return;
      show(shared_.scores_full[buffer]);
      if (++buffer == Sizes::kScoreBuffers) buffer = 0;
    }
  }

  /// Adds the parts of dQ that a warpgroup writes.
  __device__ __forceinline__ void add_sums(int which) {
    for (unsigned parity = 0;; parity ^= 1) {
      shared_.sums_written[which].wait(parity);
      const auto tile = shared_.sums_tile[which];
      if (tile < 0) return;
      show_to_products();
      __syncwarp();
      if (lane_number() == 0) {
        add_bytes(args_.sums + std::int64_t{tile} * (64 * kDepth) + which * 4096, shared_.sums[which], 4096 * 4);
        stores_commit();
        stores_read();
        shared_.sums_empty[which].arrive();
      }
    }
  }

  __device__ __forceinline__ static void show(Barrier& barrier) {
    show_to_products();
    __syncwarp();
    if (lane_number() == 0) barrier.arrive();
  }

  /// As Shared::cells, of each lane's words.
  __device__ __forceinline__ static std::uint32_t cells_of(const std::int32_t (&words)[kCells]) {
    constexpr unsigned blocks = (1u << kBlocks) - 1;
    std::uint32_t cells = 0;
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      const auto hidden = __ballot_sync(0xffffffffu, words[cell] == Runs::hidden) & blocks;
      const auto partial = __ballot_sync(0xffffffffu, words[cell] != Runs::full) & blocks;
      cells |= std::uint32_t{hidden != blocks} << cell | (partial << 8 | hidden << 16) << 2 * cell;
    }
    return cells;
  }

  const GroupBackwardArgs& args_;
  Shared& shared_;
  std::int32_t b_, key_head_, first_block_;
};

/// What a block's warpgroups do: the last one loads, the others compute.
template <class Sizes, class Compute>
__device__ __forceinline__ void load_and_compute(const GroupBackwardArgs& args, GroupBackwardShared<Sizes>& shared,
                                                 std::int32_t b, std::int32_t key_head, std::int32_t block,
                                                 const Compute& compute) {
  if (threadIdx.x == 0) shared.begin();
  __syncthreads();
  if (threadIdx.x >= 256) {
    give_registers<Sizes::kLoaderRegisters>();
    GroupLoader<Sizes>(args, shared, b, key_head, block).run();
  } else {
    take_registers<Sizes::kRegisters>();
    compute();
  }
}

}  // namespace anyflash::cuda
