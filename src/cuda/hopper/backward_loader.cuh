// What blocks of threads of Hopper's backward kernel have in shared memory, and the warpgroup that serves the others.
// It walks the runs of neighbouring key blocks at once, and loads K and V once, then Q, dO and the numbers of their
// rows, tile by tile: plain rows by one thread, which asks the copy engine; boxes by two warps, with one that shows to
// the products what has landed. One warp shows the scores that the other warpgroups have written: who does that waits
// for all that it has asked of memory, and those who add to dQ's sums could not afford it. Two warps have the copy
// engine add to the sums.
#pragma once

#include "cuda/hopper/backward_args.h"
#include "cuda/hopper/barriers.cuh"
#include "cuda/hopper/products.cuh"
#include "cuda/portable/backward_shared.cuh"

namespace anyflash::cuda {

template <class E, int depth, int queries>
struct GroupBackwardSizes {
  using Element = E;
  static constexpr int kDepth = depth, kQueries = queries, kKeys = 128;
  static constexpr int kCells = queries / 64;  ///< query blocks of a tile
  static constexpr int kStages = 2, kScoreBuffers = 3, kThreads = 3 * 128;
  static constexpr int kScores = kQueries * kKeys;  ///< numbers of a buffer: dS
  static constexpr bool kStaged = depth > 64;       ///< dQ is added from shared memory, if rows came by the copy engine
  static_assert(kCells * (depth / 64) == 2, "each of two warpgroups makes one 64 x 64 part of dQ");
};

/// Of head sizes up to 256.
template <class E>
struct WideBackwardSizes {
  using Element = E;
  static constexpr int kDepth = 256, kQueries = 64, kKeys = 64, kCells = 1;
  static constexpr int kStages = 2, kScoreBuffers = 2, kThreads = 3 * 128;
  static constexpr int kScores = 2 * kQueries * kKeys;  ///< P, then dS
  static constexpr bool kStaged = false;
};

/// A tile to come, of kCells neighbouring query blocks.
template <int kBlocks, int kCells>
struct ComingTile {
  static constexpr std::int32_t full = 0x7fffffff, hidden = full - 1;
  std::int32_t h, block;                ///< query head; the first query block, -1 behind the last tile
  std::int32_t words[kBlocks][kCells];  ///< of each key block and query block: as DeviceRun's, or one of the above
};

/// A place in the runs of a key block.
struct RunCursor {
  DeviceRun run;  ///< what is left of it; count 0: there is none
  const DeviceRun *next, *end;

  __device__ __forceinline__ void open(const DeviceRuns& list, std::int32_t block) {
    next = list.runs + list.start[block], end = list.runs + list.start[block + 1];
    fetch();
  }
  __device__ __forceinline__ void step() {
    ++run.first;
    if (run.words < 0) --run.words;  // those that are not in the table follow one another downwards
    if (--run.count == 0) fetch();
  }
  __device__ __forceinline__ void fetch() {
    if (next == end) {
      run.count = 0;
    } else {
      run = *next++;
    }
  }
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
  // P = exp(S - lse), dS = P (dP - delta); inf and 0 of a row that has no gradient.
  float lse[kStages][Sizes::kQueries], delta[kStages][Sizes::kQueries];
  Word words[kStages][Sizes::kCells][Sizes::kKeys];
  std::int32_t tile[kStages];  ///< its first query block among those of all heads, -1 behind the last
  /// Bit c: query block c is visited; 8 + 2c + w: it hides some pairs from key block w, 16 + 2c + w: all.
  std::uint32_t cells[kStages];
  alignas(kStaged ? 1024 : 16) float sums[2][kStaged ? 4096 : 1];  ///< parts of dQ, of each warpgroup
  std::int32_t sums_tile[2];                                       ///< whose they are, -1 behind the last
  Barrier sums_written[2], sums_empty[2];
  bool done;  ///< no more scores will be written
  // Landed or written: in shared memory. Full: shown to the products too.
  Barrier keys_landed, keys, landed[kStages], full[kStages], empty[kStages];
  Barrier scores_written[kScoreBuffers], scores_full[kScoreBuffers], scores_empty[kScoreBuffers];

  /// One thread's work, before a barrier of the block.
  __device__ __forceinline__ void begin() {
    done = false;
    keys_landed.begin(64), keys.begin(1);
    for (int i = 0; i < kStages; ++i) landed[i].begin(64 + 1), full[i].begin(1), empty[i].begin(8);
    for (int i = 0; i < kScoreBuffers; ++i)
      scores_written[i].begin(8), scores_full[i].begin(1), scores_empty[i].begin(8);
    for (int i = 0; i < 2; ++i) sums_written[i].begin(4), sums_empty[i].begin(1);
    barriers_begun();
  }
  ComingTile<kBlocks, Sizes::kCells> coming[2];
  const Word* table;  ///< of words
  RunCursor cursors[kBlocks];
};

template <class Sizes>
class GroupLoader {
 public:
  using E = typename Sizes::Element;
  using Shared = GroupBackwardShared<Sizes>;
  static constexpr int kBlocks = Shared::kBlocks;
  using Coming = ComingTile<kBlocks, Sizes::kCells>;
  static constexpr int kDepth = Sizes::kDepth, kQueries = Sizes::kQueries, kKeys = Sizes::kKeys;
  static constexpr int kStages = Sizes::kStages, kCells = Sizes::kCells;

  /// first_block: of the kBlocks key blocks, of a key head.
  __device__ __forceinline__ GroupLoader(const GroupBackwardArgs& args, Shared& shared, std::int32_t b,
                                         std::int32_t key_head, std::int32_t first_block)
      : args_(args), shared_(shared), b_(b), key_head_(key_head), first_block_(first_block) {}

  __device__ __forceinline__ void run() {
    const int warp = static_cast<int>(threadIdx.x % 128 / 32);
    if (args_.mapped) {
      if (threadIdx.x % 128 == 0) copy();
      if (warp == 3) show_scores();
      if (Sizes::kStaged && (warp == 1 || warp == 2)) add_sums(warp - 1);
    } else if (warp < 2) {
      load();
    } else if (warp == 2) {
      show_tiles();
    } else {
      show_scores();
    }
  }

 private:
  static constexpr int kThreads = 64;  ///< that load

  // --- Plain rows: one thread asks for copies ------------------------------------------------------------------------

  __device__ __forceinline__ void copy() {
    constexpr int kRowBytes = kDepth * int(sizeof(E));
    shared_.keys.arrive_and_expect(2 * kKeys * kRowBytes);
    copy_rows<kKeys>(shared_.k, keys, 0, key_head_, first_block_, shared_.keys);
    copy_rows<kKeys>(shared_.v, keys, 1, key_head_, first_block_, shared_.keys);
    h_ = key_head_ * args_.group_heads - 1;
    for (auto& cursor : shared_.cursors) cursor.run.count = 0;
    auto& tile = shared_.coming[0];
    for (int count = 0;; ++count) {
      find(tile);
      const int stage = count % kStages;
      auto& full = shared_.full[stage];
      shared_.empty[stage].wait(count / kStages % 2 ^ 1);
      if (tile.block < 0) {
        shared_.tile[stage] = -1;
        full.arrive();
        return;
      }
      const auto first = (b_ * args_.sides[queries].heads + tile.h) * args_.sides[queries].blocks + tile.block;
      const auto cells = cells_of(tile);
      const int rows = min(kCells, args_.sides[queries].blocks - tile.block) * 64;  // that have numbers
      shared_.tile[stage] = first, shared_.cells[stage] = cells;
      full.arrive_and_expect(2 * kQueries * kRowBytes + 2 * rows * 4 +
                             __popc((cells >> 8 & ~(cells >> 16)) & 255) * 512);
      copy_rows<kQueries>(shared_.q[stage], queries, 0, tile.h, tile.block, full);
      copy_rows<kQueries>(shared_.dout[stage], queries, 1, tile.h, tile.block, full);
      copy_bytes(shared_.lse[stage], args_.lse + std::int64_t{first} * 64, rows * 4, full);
      copy_bytes(shared_.delta[stage], args_.delta + std::int64_t{first} * 64, rows * 4, full);
#pragma unroll
      for (int cell = 0; cell < kCells; ++cell)
#pragma unroll
        for (int w = 0; w < kBlocks; ++w)
          if (const auto words = tile.words[w][cell]; words < Coming::hidden)
            copy_bytes(&shared_.words[stage][cell][w * 64], words_at(words), 512, full);
    }
  }

  template <int kRows>
  __device__ __forceinline__ void copy_rows(E* to, Side which, int n, std::int32_t h, std::int32_t block,
                                            Barrier& barrier) const {
#pragma unroll
    for (int c = 0; c < kDepth; c += 64) copy_box(to + c * kRows, &args_.maps[which][n], c, block * 64, h, b_, barrier);
  }

  // --- Boxes: two warps copy -----------------------------------------------------------------------------------------

  __device__ __forceinline__ void load() {
    load_rows<kKeys>(shared_.k, keys, 0, key_head_, first_block_);
    load_rows<kKeys>(shared_.v, keys, 1, key_head_, first_block_);
    shared_.keys_landed.arrive_with_copies();
    if (thread() == 0) {
      h_ = key_head_ * args_.group_heads - 1;
      for (auto& cursor : shared_.cursors) cursor.run.count = 0;
      find(shared_.coming[0]);
    }
    for (int count = 0;; ++count) {
      sync_threads<1, kThreads>();
      const auto& tile = shared_.coming[count % 2];
      const int stage = count % kStages;
      shared_.empty[stage].wait(count / kStages % 2 ^ 1);
      const bool more = tile.block >= 0;
      if (more) {
        load_tile(tile, stage);
      } else if (thread() == 0) {
        shared_.tile[stage] = -1;
      }
      shared_.landed[stage].arrive_with_copies();
      if (thread() == 0) {
        shared_.landed[stage].arrive();
        if (more) find(shared_.coming[(count + 1) % 2]);
      }
      if (!more) break;
    }
    copies_commit();
    copies_wait<0>();
  }

  __device__ __forceinline__ void show_tiles() {
    shared_.keys_landed.wait(0);
    show(shared_.keys);
    for (int count = 0;; ++count) {
      const int stage = count % kStages;
      shared_.landed[stage].wait(count / kStages % 2);
      const bool last = shared_.tile[stage] < 0;
      show(shared_.full[stage]);
      if (last) return;
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
        added_bytes_read();
        shared_.sums_empty[which].arrive();
      }
    }
  }

  __device__ __forceinline__ static void show(Barrier& barrier) {
    show_to_products();
    __syncwarp();
    if (lane_number() == 0) barrier.arrive();
  }

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x % 128); }
  __device__ __forceinline__ const DeviceGroup& group(std::int32_t h) const {
    return group_of(args_, b_, h);
  }

  /// The next tile that either key block visits, of this query head or the next of the group. One thread's work.
  __device__ __forceinline__ void find(Coming& tile) {
    auto& cursors = shared_.cursors;
    while (cursors[0].run.count == 0 && cursors[kBlocks - 1].run.count == 0) {
      if (++h_ == (key_head_ + 1) * args_.group_heads) {
        tile.block = -1;
        return;
      }
      const auto& list = group(h_).queries_of_key_block;
      shared_.table = list.words;
      for (int w = 0; w < kBlocks; ++w)
        if (first_block_ + w < args_.sides[keys].blocks) cursors[w].open(list, first_block_ + w);
    }
    auto block = Coming::full;
    for (const auto& cursor : cursors)
      if (cursor.run.count > 0) block = min(block, cursor.run.first / kCells * kCells);
    tile.h = h_, tile.block = block;
    for (int w = 0; w < kBlocks; ++w)
      for (int cell = 0; cell < kCells; ++cell) {
        const auto& run = cursors[w].run;
        tile.words[w][cell] = Coming::hidden;
        if (run.count == 0 || run.first != block + cell) continue;
        tile.words[w][cell] = run.kind == TileClass::full ? Coming::full : run.words;
        cursors[w].step();
      }
  }

  __device__ __forceinline__ static std::uint32_t cells_of(const Coming& tile) {
    std::uint32_t cells = 0;
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell)
#pragma unroll
      for (int w = 0; w < kBlocks; ++w) {
        const auto words = tile.words[w][cell];
        if (words != Coming::hidden) cells |= 1u << cell;
        if (words != Coming::full) cells |= (words == Coming::hidden ? 0x10100u : 0x100u) << (2 * cell + w);
      }
    return cells;
  }
  __device__ __forceinline__ const Word* words_at(std::int32_t words) const {
    return words < 0 ? args_.words + std::int64_t{~words} * 64 : shared_.table + std::int64_t{words} * 64;
  }

  __device__ __forceinline__ void load_tile(const Coming& tile, int stage) {
    load_rows<kQueries>(shared_.q[stage], queries, 0, tile.h, tile.block);
    load_rows<kQueries>(shared_.dout[stage], queries, 1, tile.h, tile.block);
    const auto first = (b_ * args_.sides[queries].heads + tile.h) * args_.sides[queries].blocks + tile.block;
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell)
#pragma unroll
      for (int w = 0; w < kBlocks; ++w)
        if (const auto words = tile.words[w][cell]; words < Coming::hidden)
          copy_8(&shared_.words[stage][cell][w * 64 + thread()], words_at(words) + thread());
    if (thread() == 0) shared_.tile[stage] = first, shared_.cells[stage] = cells_of(tile);
    // Four rows a thread; those of a query block that does not exist are of no account, as all pairs are hidden.
    if (const int row = 4 * (thread() % 32); row < kQueries) {
      const bool first_half = thread() < 32, exists = tile.block + row / 64 < args_.sides[queries].blocks;
      copy_16((first_half ? shared_.lse : shared_.delta)[stage] + row,
              (first_half ? args_.lse : args_.delta) + (exists ? std::int64_t{first} * 64 + row : 0), exists ? 16 : 0);
    }
  }

  /// kRows rows from a block on, zeros where there are none, swizzled.
  template <int kRows>
  __device__ __forceinline__ void load_rows(E* to, Side which, int n, std::int32_t h, std::int32_t block) const {
    constexpr int kChunks = kDepth / 8, kStep = kThreads / kChunks;
    static_assert(kStep <= 8 && 64 % kStep == 0);
    const auto& side = args_.sides[which];
    const auto& rows = side.rows[n];
    const auto& stride = rows.sequence;
    const int row = thread() / kChunks, channel = thread() % kChunks * 8;
    const E* const data = head_data<E>(rows, b_, h) + channel;
    const int bytes = channel < args_.channels[n] ? 16 : 0;
    const auto size = which == queries ? side.grid.size : group(h).program->k_size();
    // As SwizzledTile::at: i is a multiple of kStep, row less than that.
    to += channel / 64 * (kRows * 64) + row * 64;
    const int column = (channel % 64 / 8 ^ row) * 8;
    const auto place = [&](int i) { return to + i * 64 + (column ^ i % 8 * 8); };
    if (side.plain) {
      const int left = bytes > 0 ? size[2] - block * 64 - row : 0;
      const E* from = data + (block * 64 + row) * stride[2];
#pragma unroll
      for (int i = 0; i < kRows; i += kStep, from += kStep * stride[2])
        copy_16(place(i), i < left ? from : head_data<E>(rows, b_, h), i < left ? 16 : 0);
      return;
    }
#pragma unroll 1
    for (int cell = 0; cell < kRows / 64; ++cell) {
      const bool whole = block + cell < side.blocks;
      const auto box = side.grid.box(whole ? block + cell : block);
#pragma unroll 1
      for (int i = 0; i < 64; i += kStep) {
        const auto c = entry_of(box, row + i);
        const bool exists = whole && rules::inside(c, size) && bytes > 0;
        const auto at = c[0] * stride[0] + c[1] * stride[1] + c[2] * stride[2];
        copy_16(place(cell * 64 + i), exists ? data + at : head_data<E>(rows, b_, h), exists ? 16 : 0);
      }
    }
  }

  const GroupBackwardArgs& args_;
  Shared& shared_;
  std::int32_t b_, key_head_, first_block_, h_;  // h_: of the tile last found, one thread's
};

/// What a block's warpgroups do: the last one loads, the others compute.
template <class Sizes, class Compute>
__device__ __forceinline__ void load_and_compute(const GroupBackwardArgs& args, GroupBackwardShared<Sizes>& shared,
                                                 std::int32_t b, std::int32_t key_head, std::int32_t block,
                                                 const Compute& compute) {
  if (threadIdx.x == 0) shared.begin();
  __syncthreads();
  if (threadIdx.x >= 256) {
    give_registers<24>();
    GroupLoader<Sizes>(args, shared, b, key_head, block).run();
  } else {
    take_registers<240>();
    compute();
  }
}

}  // namespace anyflash::cuda
