// Shared memory of Hopper's backward kernel, and its producer warpgroup. The producer takes tasks until there are none,
// and walks the runs of a task's neighbouring key blocks together. Two warps issue TMA loads: of K and V once, then,
// alternating between tiles, of Q, dO, row terms and the bias. With one warp, under a rule where each tile is a run of
// its own, loading would take longer than the products. The third warp issues the proxy fence for dS written by the
// consumers. The fence waits for all memory operations of its thread, which would delay the warps that add to dQ's
// sums. It also stores dS as the bias's gradient, by TMA. Of the fourth warp, one lane per consumer warpgroup issues
// TMA additions to the sums.
//
// A tile's bias is loaded to where its dS will be: each lane reads biases at the places where it writes dS.
#pragma once

#include "cuda/hopper/backward_args.h"
#include "cuda/hopper/backward_kernels.h"
#include "cuda/portable/backward_shared.cuh"
#include "cuda/tile/runs.cuh"

namespace anyflash::cuda {

template <class E, int depth, int queries, ScoreKind kind>
struct GroupBackwardSizes {
  using Element = E;
  static constexpr bool kGeneral = kind != ScoreKind::scaled, kCopied = kind == ScoreKind::finished;
  static constexpr int kDepth = depth, kQueries = queries, kKeys = 128;
  static constexpr int kCells = queries / 64;  ///< query blocks of a tile
  static constexpr int kStages = 2, kScoreBuffers = 3, kThreads = 3 * 128;
  static constexpr bool kSpare = depth == 64 && !kGeneral;  ///< leaves more registers to the producer
  static constexpr int kRegisters = kSpare ? 232 : 240, kLoaderRegisters = kSpare ? 40 : 24;
  static constexpr int kScores = kQueries * kKeys;  ///< numbers of a score buffer: dS
  static constexpr int kGradients = 0;              ///< where dS begins in it
  static constexpr bool kStaged = depth > 64;       ///< dQ is added from shared memory, by TMA
  static constexpr bool kValuesFirst = true;        ///< V's memory is free for the next task before K's
  static_assert(kCells * (depth / 64) == 2, "each of two warpgroups makes one 64 x 64 part of dQ");
};

/// Head sizes up to 256.
template <class E, ScoreKind kind>
struct WideBackwardSizes {
  using Element = E;
  static constexpr bool kGeneral = kind != ScoreKind::scaled, kCopied = kind == ScoreKind::finished;
  static constexpr int kDepth = 256, kQueries = 64, kKeys = 64, kCells = 1;
  static constexpr int kStages = 2, kScoreBuffers = 2, kThreads = 3 * 128;
  static constexpr int kRegisters = 240, kLoaderRegisters = 24;
  static constexpr int kScores = 2 * kQueries * kKeys;  ///< P^T, then dS
  static constexpr int kGradients = kQueries * kKeys;
  static constexpr bool kStaged = false;
  static constexpr bool kValuesFirst = false;
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
  alignas(1024) E scores[kScoreBuffers][Sizes::kScores];  ///< dS: for each query block and key block 64 x 64
  static_assert(Sizes::kQueries % 4 == 0);                // TMA needs aligned destinations
  // P = exp(S - lse), dS = P (dP - delta + dlse). Rows without a gradient have inf, 0 and 0.
  float lse[kStages][Sizes::kQueries], delta[kStages][Sizes::kQueries], dlse[kStages][Sizes::kQueries];
  Word words[kStages][Sizes::kCells][Sizes::kKeys];
  std::int32_t scores_tile[kScoreBuffers];  ///< the tile of the dS in each buffer
  std::int32_t tile[kStages];               ///< its first query block among those of all heads; -1 after the last
  /// Bit c: query block c is visited; 8 + 2c + w: it hides some pairs from key block w, 16 + 2c + w: all.
  std::uint32_t cells[kStages];
  alignas(kStaged ? 1024 : 16) float sums[2][kStaged ? 4096 : 1];  ///< each warpgroup's part of dQ
  std::int32_t sums_tile[2];                                       ///< its tile; -1 after the last
  Barrier sums_written[2], sums_empty[2];
  std::int32_t b, key_head, first_block;  ///< the task; first_block -1: no more tasks
  bool done;                              ///< no more dS will be written
  bool any_large_lse;                     ///< as in RowTerms
  bool left;                              ///< too many mask words: the portable kernels compute all
  Barrier keys_full, keys_empty, values_empty, full[kStages], empty[kStages];
  Barrier task_written, task_read;
  std::int32_t task;     ///< the next task, passed between the two warps that load
  Barrier results_read;  ///< TMA has read dK and dV from borrowed memory
  // Written: the consumers have written it. Full: the proxy fence is done too, so that products may read it.
  Barrier scores_written[kScoreBuffers], scores_full[kScoreBuffers], scores_empty[kScoreBuffers];

  /// Called by one thread, before a barrier of the thread block.
  __device__ __forceinline__ void begin(const GroupBackwardArgs& args) {
    done = false, any_large_lse = *args.terms.any_large_lse != 0;
    // Read once: another thread block may report a NaN between two warps' reads.
    left = args.masks_on_device && *args.not_finite != 0;
    keys_full.begin(1), keys_empty.begin_for_warps(8), values_empty.begin_for_warps(8);
    task_written.begin(1), task_read.begin_for_warps(1), results_read.begin(2);
    for (int i = 0; i < kStages; ++i) full[i].begin_for_warps(1), empty[i].begin_for_warps(8);
    for (int i = 0; i < kScoreBuffers; ++i)
      scores_written[i].begin_for_warps(8), scores_full[i].begin_for_warps(1),
          scores_empty[i].begin_for_warps(8, args.bias_stored);
    for (int i = 0; i < 2; ++i) sums_written[i].begin_for_warps(4), sums_empty[i].begin(1);
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
  static constexpr int kStages = Sizes::kStages, kCells = Sizes::kCells, kScoreBuffers = Sizes::kScoreBuffers;

  __device__ __forceinline__ GroupLoader(const GroupBackwardArgs& args, Shared& shared)
      : args_(args), shared_(shared) {}

  __device__ __forceinline__ void run() {
    const int warp = static_cast<int>(uniform(threadIdx.x % 128 / 32));
    if (warp < 2) copy(warp);
    if (warp == 2) show_scores();
    if (Sizes::kStaged && warp == 3 && lane_number() < 2) add_sums(static_cast<int>(lane_number()));
  }

 private:
  __device__ __forceinline__ static bool leads() { return lane_number() == 0; }

  /// which: the stage that this warp fills. Both warps walk all tiles. The first one also loads K and V and takes the
  /// tasks: the next one once the last tile of a task has been requested.
  __device__ __forceinline__ void copy(const int which) {
    auto task = static_cast<std::int32_t>(blockIdx.x);  // first tasks by block number, others from a counter
    if (shared_.left) task = args_.tasks;
    Runs runs;
    Task now(args_, task);
    if (task < args_.tasks) open(runs, now.b, now.key_head * args_.group_heads, now.first_block);
    for (unsigned n = 0;; ++n) {
      if (task >= args_.tasks) {
        if (which == 0) shared_.keys_empty.wait(n % 2 ^ 1);
        if (which == 0 && leads()) shared_.first_block = -1, shared_.keys_full.arrive();
        return;
      }
      load_tiles(runs, now, which, n % 2 ^ 1);
      if (which == 0) {
        if (leads()) task = static_cast<std::int32_t>(gridDim.x) + atomicAdd(args_.next_task, 1);
        task = uniform(task);
        shared_.task_read.wait(n % 2 ^ 1);
        if (leads()) shared_.task = task, shared_.task_written.arrive();
      } else {
        end_tiles(which);
        shared_.task_written.wait(n % 2);
        task = uniform(shared_.task);
        shared_.task_read.arrive_for_warp();
      }
      now = Task(args_, task);
      if (task < args_.tasks) open(runs, now.b, now.key_head * args_.group_heads, now.first_block);
      if (which == 0) end_tiles(which);
    }
  }

  struct Task {
    std::int32_t b, key_head, first_block;
    __device__ __forceinline__ Task(const GroupBackwardArgs& args, std::int32_t task) {
      const auto& side = args.sides[keys];
      const auto parts = (side.blocks + kBlocks - 1) / kBlocks, head = task / parts;
      b = head / side.heads, key_head = head - b * side.heads;
      first_block = (task - head * parts) * kBlocks;  // under causal rules the first blocks take longest
    }
  };

  __device__ __forceinline__ void open(Runs& runs, std::int32_t b, std::int32_t h, std::int32_t first_block) const {
    runs.open(group_of(args_, b, h).queries_of_key_block, first_block, args_.sides[keys].blocks);
  }

  /// Where V's memory is free before K's, V and the first tile are loaded first, and K is prefetched to L2.
  __device__ __forceinline__ void load_values(MapPlace at, unsigned parity) {
    const Part<kKeys> part;
    const auto* const map = &args_.maps[keys][part.tensor()].map;
    if (part.exists() && part.tensor() == 0) prefetch_box(map, part.channel(), at[0], at[1], at[2], at[3]);
    shared_.values_empty.wait(parity);
    if (leads()) shared_.keys_full.expect(kKeys * kDepth * int(sizeof(E)));
    __syncwarp();
    if (part.exists() && part.tensor() == 1)
      copy_box(part.of(shared_.k, shared_.v), map, part.channel(), at[0], at[1], at[2], at[3], shared_.keys_full);
  }
  __device__ __forceinline__ void load_keys(const Task& task, MapPlace at, unsigned parity) {
    const Part<kKeys> part;
    shared_.keys_empty.wait(parity);
    if (leads()) {
      shared_.b = task.b, shared_.key_head = task.key_head, shared_.first_block = task.first_block;
      shared_.keys_full.arrive_and_expect((Sizes::kValuesFirst ? 1 : 2) * kKeys * kDepth * int(sizeof(E)));
    }
    __syncwarp();
    if (part.exists() && (!Sizes::kValuesFirst || part.tensor() == 0))
      copy_box(part.of(shared_.k, shared_.v), &args_.maps[keys][part.tensor()].map, part.channel(), at[0], at[1], at[2],
               at[3], shared_.keys_full);
  }

  /// A lane's share of loading neighbouring blocks' rows of two tensors: 64 channels of one block. Blocks that do not
  /// exist give zeros.
  template <int kRows>
  struct Part {
    static constexpr unsigned kOfBlocks = kRows / 64, kOfTensor = kOfBlocks * (kDepth / 64);
    static constexpr int kAll = 2 * kOfTensor;
    static_assert(kAll <= 16);

    __device__ __forceinline__ static bool exists() { return lane_number() < kAll; }
    __device__ __forceinline__ static int tensor() { return lane_number() < kOfTensor ? 0 : 1; }
    __device__ __forceinline__ static int block() { return static_cast<int>(lane_number() % kOfBlocks); }
    __device__ __forceinline__ static int channel() {
      return static_cast<int>(lane_number() % kOfTensor / kOfBlocks * 64);
    }
    __device__ __forceinline__ static E* of(E* first, E* second) {
      return (tensor() == 0 ? first : second) + channel() * kRows + block() * 4096;
    }
  };

  /// Everything about a tile is computed before its stage is free: then all loads are issued at once, one per lane.
  /// runs: those of the first query head.
  __device__ __forceinline__ void load_tiles(Runs& runs, const Task& task, int which, unsigned keys_parity) {
    const auto b = task.b;
    const auto keys_at = place_of(
        args_.maps[keys][0], origin_of(args_.cuts[keys], task.first_block + Part<kKeys>::block()), task.key_head, b);
    bool keys_wanted = which == 0;
    if (Sizes::kValuesFirst && keys_wanted) load_values(keys_at, keys_parity);
    if (!Sizes::kValuesFirst && keys_wanted) load_keys(task, keys_at, keys_parity), keys_wanted = false;
    for (auto n = 0; n < args_.group_heads; ++n) {
      const auto h = task.key_head * args_.group_heads + n;
      if (n > 0) open(runs, b, h, task.first_block);
      const auto* const table = group_of(args_, b, h).queries_of_key_block.words;
      for (;;) {
        std::int32_t words[kCells];
        const auto block = runs.find(words);
        if (block < 0) break;
        if (stage_ == which) {
          const auto first = (b * args_.sides[queries].heads + h) * args_.sides[queries].blocks + block;
          const auto cells = cells_of(words);
          const Part<kQueries> part;
          const auto at = place_of(args_.maps[queries][0], origin_of(args_.cuts[queries], block + part.block()), h, b);
          auto& full = shared_.full[stage_];
          shared_.empty[stage_].wait(parity_ ^ 1);
          const int rows = min(kCells, args_.sides[queries].blocks - block) * 64;  // that have row terms
          if constexpr (kCells > 1) {
            if (rows < kQueries) clear_numbers();
          }
          if (leads()) shared_.tile[stage_] = first, shared_.cells[stage_] = cells;
          full.arrive_and_expect_for_warp(2 * kQueries * kDepth * int(sizeof(E)) + (args_.has_dlse ? 3 : 2) * rows * 4 +
                                          __popc((cells >> 8 & ~(cells >> 16)) & 255) * 512 +
                                          (Sizes::kCopied && args_.bias_copied ? kCells * kBlocks * 8192 : 0));
          __syncwarp();
          const auto lane = static_cast<int>(lane_number());
          if (part.exists()) {
            copy_box(part.of(shared_.q[stage_], shared_.dout[stage_]), &args_.maps[queries][part.tensor()].map,
                     part.channel(), at[0], at[1], at[2], at[3], full);
          } else if (lane < part.kAll + (args_.has_dlse ? 3 : 2)) {
            const int n = lane - part.kAll;
            copy_bytes(n == 0   ? shared_.lse[stage_]
                       : n == 1 ? shared_.delta[stage_]
                                : shared_.dlse[stage_],
                       (n == 0   ? args_.lse
                        : n == 1 ? args_.delta
                                 : args_.dlse) +
                           std::int64_t{first} * 64,
                       rows * 4, full);
          }
#pragma unroll
          for (int cell = 0; cell < kCells; ++cell)
            if (const auto tile = words[cell]; tile < Runs::hidden)
              copy_bytes(&shared_.words[stage_][cell][lane * 64],
                         tile < 0 ? args_.words + std::int64_t{~tile} * 64 : table + std::int64_t{tile} * 64, 512,
                         full);
          if constexpr (Sizes::kCopied) {
            if (args_.bias_copied) load_bias(task, h, block, full);
          }
        }
        advance_buffer();
        step();
        if (keys_wanted) load_keys(task, keys_at, keys_parity), keys_wanted = false;
      }
    }
    if (keys_wanted) load_keys(task, keys_at, keys_parity);
  }

  /// Clears row terms of a tile's second query block that does not exist. P is 0 there, but 0 times stale data may be
  /// NaN.
  __device__ __forceinline__ void clear_numbers() {
    for (auto row = 64 + lane_number(); row < kQueries; row += 32)
      shared_.delta[stage_][row] = shared_.dlse[stage_][row] = 0;
    fence_proxy_async();  // TMA writes there later
    __syncwarp();
  }

  /// Signals the end of a task's tiles.
  __device__ __forceinline__ void end_tiles(int which) {
    if (stage_ == which) {
      shared_.empty[stage_].wait(parity_ ^ 1);
      if (leads()) shared_.tile[stage_] = -1;
      shared_.full[stage_].arrive_for_warp();
    }
    step();
  }

  /// Loads the bias of a tile to where its dS will be; lane n loads part n.
  __device__ __forceinline__ void load_bias(const Task& task, std::int32_t h, std::int32_t block, Barrier& full) {
    shared_.scores_empty[buffer_].wait(buffer_parity_ ^ 1);
    if (const auto n = static_cast<int>(lane_number()); n < kCells * kBlocks) {
      const int cell = n / kBlocks, w = n % kBlocks;
      copy_box(shared_.scores[buffer_] + Sizes::kGradients + n * 4096, &args_.bias_map, (task.first_block + w) * 64,
               args_.bias.query != 0 ? (block + cell) * 64 : 0, args_.bias.head != 0 ? h : 0,
               args_.bias.batch != 0 ? task.b : 0, 0, full);
    }
  }
  __device__ __forceinline__ void advance_buffer() {
    if (Sizes::kCopied && ++buffer_ == kScoreBuffers) buffer_ = 0, buffer_parity_ ^= 1;
  }

  __device__ __forceinline__ void step() {
    if (++stage_ == kStages) stage_ = 0, parity_ ^= 1;
  }

  __device__ __forceinline__ void show_scores() {
    int buffer = 0;
    for (unsigned parity = 0;; parity ^= buffer == 0) {
      shared_.scores_written[buffer].wait(parity);
      if (shared_.done) return;
      const auto tile = shared_.scores_tile[buffer], first_block = shared_.first_block;  // before the next task
      show(shared_.scores_full[buffer]);
      if constexpr (Sizes::kCopied) {
        if (args_.bias_stored && leads()) store_bias_gradient(tile, first_block, buffer);
      }
      if (++buffer == kScoreBuffers) buffer = 0;
    }
  }

  __device__ __forceinline__ void store_bias_gradient(std::int32_t tile, std::int32_t first_block, int buffer) {
    const auto& side = args_.sides[queries];
    const auto head = tile / side.blocks, block = tile - head * side.blocks, b = head / side.heads;
    for (int n = 0; n < kCells * kBlocks; ++n)
      store_box(&args_.bias_gradient_map, shared_.scores[buffer] + Sizes::kGradients + n * 4096,
                (first_block + n % kBlocks) * 64, (block + n / kBlocks) * 64, head - b * side.heads, b, 0);
    stores_commit();
    stores_read();
    shared_.scores_empty[buffer].arrive();
  }

  /// One lane adds the parts of dQ that a warpgroup writes.
  __device__ __forceinline__ void add_sums(int which) {
    for (unsigned parity = 0;; parity ^= 1) {
      shared_.sums_written[which].wait(parity);
      const auto tile = shared_.sums_tile[which];
      if (tile < 0) return;
      fence_proxy_async();
      add_bytes(args_.sums + std::int64_t{tile} * (64 * kDepth) + which * 4096, shared_.sums[which], 4096 * 4);
      stores_commit();
      stores_read();
      shared_.sums_empty[which].arrive();
    }
  }

  __device__ __forceinline__ static void show(Barrier& barrier) {
    fence_proxy_async();
    release(barrier);
  }

  /// Shared::cells, from each lane's words.
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
  int stage_ = 0, buffer_ = 0;
  unsigned parity_ = 0, buffer_parity_ = 0;
};

/// The roles of a thread block's warpgroups: the last one is the producer, the others are consumers.
template <class Sizes, class Compute>
__device__ __forceinline__ void load_and_compute(const GroupBackwardArgs& args, GroupBackwardShared<Sizes>& shared,
                                                 const Compute& compute) {
  wait_for_kernel_before();
  let_next_kernel_begin();
  if (threadIdx.x == 0) shared.begin(args);
  __syncthreads();
  if (threadIdx.x >= 256) {
    setmaxnreg_dec<Sizes::kLoaderRegisters>();
    GroupLoader<Sizes>(args, shared).run();
  } else {
    setmaxnreg_inc<Sizes::kRegisters>();
    compute();
  }
}

}  // namespace anyflash::cuda
