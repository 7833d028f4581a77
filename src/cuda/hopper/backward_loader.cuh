// What blocks of threads of Hopper's backward kernel have in shared memory, and the warpgroup that fills it: it walks the runs
// of two neighbouring key blocks at once, and loads K and V once, then Q, dO and the numbers of their rows, tile by tile.
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
  static_assert(kCells * (depth / 64) == 2, "each of two warpgroups makes one 64 x 64 part of dQ");
};

/// A tile to come, of kCells neighbouring query blocks.
template <int kCells>
struct ComingTile {
  static constexpr std::int32_t full = 0x7fffffff, hidden = full - 1;
  std::int32_t h, block;          ///< query head; the first query block, -1 behind the last tile
  std::int32_t words[2][kCells];  ///< of each key block and query block: as DeviceRun's, or one of the above
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
  alignas(1024) E k[Sizes::kKeys * Sizes::kDepth];
  alignas(1024) E v[Sizes::kKeys * Sizes::kDepth];
  alignas(1024) E q[kStages][Sizes::kQueries * Sizes::kDepth];
  alignas(1024) E dout[kStages][Sizes::kQueries * Sizes::kDepth];
  alignas(1024) E ds[kScoreBuffers][Sizes::kQueries * Sizes::kKeys];  ///< dS^T: panels of 64 queries
  // P = 2^(S unit + shift), dS = P (dP - delta); -inf and 0 of a row that has no gradient.
  float shift[kStages][Sizes::kQueries], delta[kStages][Sizes::kQueries];
  Word words[kStages][Sizes::kCells][Sizes::kKeys];
  std::int32_t tile[kStages];    ///< its first query block among those of all heads, -1 behind the last
  std::uint32_t cells[kStages];  ///< bit c: query block c is visited; bit 8 + 2c + w: key block w needs its words there
  Barrier keys, full[kStages], empty[kStages], scores_full[kScoreBuffers], scores_empty[kScoreBuffers];
  ComingTile<Sizes::kCells> coming[2];
  RunCursor cursors[2];
};

template <class Sizes>
class GroupLoader {
 public:
  using E = typename Sizes::Element;
  using Shared = GroupBackwardShared<Sizes>;
  using Coming = ComingTile<Sizes::kCells>;
  static constexpr int kDepth = Sizes::kDepth, kQueries = Sizes::kQueries, kKeys = Sizes::kKeys;
  static constexpr int kStages = Sizes::kStages, kCells = Sizes::kCells;

  /// first_block: of two key blocks of a key head.
  __device__ __forceinline__ GroupLoader(const GroupBackwardArgs& args, Shared& shared, std::int32_t b,
                                         std::int32_t key_head, std::int32_t first_block)
      : args_(args), shared_(shared), b_(b), key_head_(key_head), first_block_(first_block) {}

  __device__ __forceinline__ void run() {
    load_rows<kKeys>(shared_.k, keys, 0, key_head_, first_block_);
    load_rows<kKeys>(shared_.v, keys, 1, key_head_, first_block_);
    if (thread() == 0) {
      h_ = key_head_ * args_.group_heads - 1;
      for (auto& cursor : shared_.cursors) cursor.run.count = 0;
      find(shared_.coming[0]);
    }
    loaded(shared_.keys);
    for (int count = 0;; ++count) {
      sync_threads<1, 128>();
      const auto& tile = shared_.coming[count % 2];
      const int stage = count % kStages;
      shared_.empty[stage].wait(count / kStages % 2 ^ 1);
      if (tile.block < 0) {
        if (thread() == 0) shared_.tile[stage] = -1;
        shared_.full[stage].arrive();
        return;
      }
      load_tile(tile, stage);
      if (thread() == 0) find(shared_.coming[(count + 1) % 2]);
      loaded(shared_.full[stage]);
    }
  }

 private:
  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x % 128); }
  __device__ __forceinline__ const DeviceGroup& group(std::int32_t h) const {
    return args_.groups[(args_.batch_groups > 1 ? b_ : 0) * args_.head_groups + (args_.head_groups > 1 ? h : 0)];
  }

  /// The next tile that either key block visits, of this query head or the next of the group. One thread's work.
  __device__ __forceinline__ void find(Coming& tile) {
    auto& cursors = shared_.cursors;
    while (cursors[0].run.count == 0 && cursors[1].run.count == 0) {
      if (++h_ == (key_head_ + 1) * args_.group_heads) {
        tile.block = -1;
        return;
      }
      const auto& list = group(h_).queries_of_key_block;
      cursors[0].open(list, first_block_);
      if (first_block_ + 1 < args_.sides[keys].blocks) cursors[1].open(list, first_block_ + 1);
    }
    auto block = Coming::full;
    for (const auto& cursor : cursors)
      if (cursor.run.count > 0) block = min(block, cursor.run.first / kCells * kCells);
    tile.h = h_, tile.block = block;
    for (int w = 0; w < 2; ++w)
      for (int cell = 0; cell < kCells; ++cell) {
        const auto& run = cursors[w].run;
        tile.words[w][cell] = Coming::hidden;
        if (run.count == 0 || run.first != block + cell) continue;
        tile.words[w][cell] = run.kind == TileClass::full ? Coming::full : run.words;
        cursors[w].step();
      }
  }

  __device__ __forceinline__ void load_tile(const Coming& tile, int stage) {
    load_rows<kQueries>(shared_.q[stage], queries, 0, tile.h, tile.block);
    load_rows<kQueries>(shared_.dout[stage], queries, 1, tile.h, tile.block);
    const int key = thread(), w = key / 64;
    const auto* const table = group(tile.h).queries_of_key_block.words;
    const auto first = (b_ * args_.sides[queries].heads + tile.h) * args_.sides[queries].blocks + tile.block;
    std::uint32_t cells = 0;
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      const auto words = tile.words[w][cell];
      Word* const to = &shared_.words[stage][cell][key];
      if (words == Coming::hidden) {
        *to = 0;
      } else if (words != Coming::full) {
        copy_8(to, words < 0 ? args_.words + std::int64_t{~words} * 64 + key % 64
                             : table + std::int64_t{words} * 64 + key % 64);
      }
      for (int n = 0; n < 2; ++n) {
        if (tile.words[n][cell] != Coming::hidden) cells |= 1u << cell;
        if (tile.words[n][cell] != Coming::full) cells |= 256u << (2 * cell + n);
      }
    }
    if (key == 0) shared_.tile[stage] = first, shared_.cells[stage] = cells;
    if (key < kQueries) load_terms(stage, first, key, cells);
  }

  __device__ __forceinline__ void load_terms(int stage, std::int32_t first, int row, std::uint32_t cells) {
    float shift = -infinity(), delta = 0;
    if (cells >> row / 64 & 1 && args_.terms.live[first + row / 64] >> row % 64 & 1) {
      const auto at = std::int64_t{first} * 64 + row;
      shift = static_cast<const float*>(args_.terms.lse)[at] * -1.44269504f;
      delta = static_cast<const float*>(args_.terms.delta)[at] - static_cast<const float*>(args_.terms.dlse)[at];
    }
    shared_.shift[stage][row] = shift, shared_.delta[stage][row] = delta;
  }
  __device__ __forceinline__ static float infinity() { return __int_as_float(0x7f800000); }

  __device__ __forceinline__ static void loaded(Barrier& barrier) {
    copies_commit();
    copies_wait<0>();
    show_to_products();
    barrier.arrive();
  }

  /// kRows rows from a block on, zeros where there are none, swizzled.
  template <int kRows>
  __device__ __forceinline__ void load_rows(E* to, Side which, int n, std::int32_t h, std::int32_t block) const {
    constexpr int kChunks = kDepth / 8, kStep = 128 / kChunks;
    static_assert(kStep % 8 == 0);
    const auto& side = args_.sides[which];
    const auto& rows = side.rows[n];
    const auto& stride = rows.sequence;
    const int row = thread() / kChunks, channel = thread() % kChunks * 8;
    const E* const data = head_data<E>(rows, b_, h) + channel;
    const int bytes = channel < args_.channels[n] ? 16 : 0;
    const auto size = which == queries ? side.grid.size : group(h).program->k_size();
    to += SwizzledTile<E, kRows, kDepth>::at(row, channel);
    if (side.plain) {
      const int first = block * 64 + row, left = size[2] - first;
      const E* const from = data + first * stride[2];
#pragma unroll
      for (int i = 0; i < kRows; i += kStep) {
        const bool exists = i < left && bytes > 0;
        copy_16(to + i * 64, exists ? from + i * stride[2] : head_data<E>(rows, b_, h), exists ? bytes : 0);
      }
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
        copy_16(to + (cell * 64 + i) * 64, exists ? data + at : head_data<E>(rows, b_, h), exists ? bytes : 0);
      }
    }
  }

  const GroupBackwardArgs& args_;
  Shared& shared_;
  std::int32_t b_, key_head_, first_block_, h_;  // h_: of the tile last found, one thread's
};

}  // namespace anyflash::cuda
