// How a producer warp walks tiles: the runs of neighbouring blocks of one side together, so that each load of the other
// side serves all of them. Also where in the sequence a block begins.
#pragma once

#include "cuda/portable/args.h"
#include "cuda/tile/barriers.cuh"
#include "cuda/tile/row_map.h"
#include "rules/bits.h"

namespace anyflash::cuda {

using rules::Int3, rules::TileClass, rules::Word;

/// Tells the compiler that all threads of a warp have the same number: values derived from it, such as operands'
/// addresses, then use uniform instructions and registers.
template <class T>
__device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

/// The head of a task, over all batch entries, and its part of the queries. Tasks of heads that share L2 are
/// interleaved. Within a head the last parts come first: under causal rules they take longest.
struct TaskPlace {
  std::int32_t head, part;
};
template <class Args>
__device__ __forceinline__ TaskPlace place_of_task(const Args& args, std::int32_t task) {
  const auto all = args.near_heads * args.head_parts, section = task / all, rest = task % all;
  const auto heads = min(args.near_heads, args.tasks / args.head_parts - section * args.near_heads);
  return {section * args.near_heads + rest % heads, args.head_parts - 1 - rest / heads};
}

/// Blocks first .. end - 1.
struct BlockWindow {
  std::int32_t first, end;
};

/// The runs of kBlocks neighbouring blocks, by a warp: lane w has block w's. A tile is kCells neighbouring blocks of
/// the other side. kWindow: only blocks of the other side that lie in a window are visited.
template <int kBlocks, int kCells, bool kWindow = false>
class MergedRuns {
 public:
  static constexpr std::int32_t full = 0x7fffffff, hidden = full - 1;

  __device__ __forceinline__ void open(const DeviceRuns& list, std::int32_t first_block, std::int32_t blocks,
                                       BlockWindow window = {}) {
    window_ = window;
    const auto block = first_block + static_cast<std::int32_t>(lane_number());
    next_ = reinterpret_cast<const int4*>(list.runs);
    left_ = 0;
    if (lane_number() < kBlocks && block < blocks) {
      const auto start = list.start[block];
      next_ += start, left_ = static_cast<std::int32_t>(list.start[block + 1] - start);
    }
    fetch();
  }

  __device__ __forceinline__ bool more() const { return __any_sync(0xffffffffu, count_ > 0); }
  /// How many times kTogether blocks come next that the blocks of all lanes with `mine` see whole.
  template <int kTogether>
  __device__ __forceinline__ std::int32_t whole(bool mine) const {
    const auto first = __reduce_min_sync(0xffffffffu, mine ? first_ : full);
    const bool sees = count_ >= kTogether && words_ == full && first_ == first;
    if (!__all_sync(0xffffffffu, !mine || sees)) return 0;
    return __reduce_min_sync(0xffffffffu, mine ? count_ : full) / kTogether;
  }
  /// Passes over so many of them. Returns the first.
  template <int kTogether>
  __device__ __forceinline__ std::int32_t pass_whole(bool mine) {
    const auto first = __reduce_min_sync(0xffffffffu, mine ? first_ : full);
    if (mine) first_ += kTogether, count_ -= kTogether;
    if (mine && count_ == 0) fetch();
    return first;
  }
  /// The first block of the next tile that any of the blocks visits, -1 if there is none. words[c]: the mask words of
  /// this lane's block with block c of the tile, as in DeviceRun, or one of the constants above.
  __device__ __forceinline__ std::int32_t find(std::int32_t (&words)[kCells]) {
    const auto block = __reduce_min_sync(0xffffffffu, count_ > 0 ? first_ / kCells * kCells : full);
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      words[cell] = hidden;
      if (count_ == 0 || first_ != block + cell) continue;
      words[cell] = words_;
      ++first_;
      if (words_ < 0) --words_;  // numbers of tiles without words in the table count downwards
      if (--count_ == 0) fetch();
    }
    return block == full ? -1 : block;
  }

 private:
  static_assert(sizeof(DeviceRun) == sizeof(int4), "a run is read at once");

  /// Prefetches the cache line of a later run. Waiting for a run would delay every tile of a narrow rule, and reading
  /// one ahead would need registers that are not free.
  __device__ __forceinline__ void fetch() {
    count_ = 0;
    do {
      if (left_ == 0) return;
      if (left_ > 8) asm volatile("prefetch.global.L1 [%0];" ::"l"(next_ + 8));
      const int4 run = __ldg(next_);
      ++next_, --left_;
      first_ = run.x, count_ = run.y, words_ = (run.z & 255) == int(TileClass::full) ? full : run.w;
      if (!kWindow || count_ == 0) return;
      const auto skipped = max(window_.first - first_, 0), end = min(first_ + count_, window_.end);
      first_ += skipped, count_ = max(end - first_, 0);
      if (words_ < 0) words_ -= skipped;
      if (first_ >= window_.end) left_ = 0;
    } while (count_ == 0);
  }

  std::int32_t first_, count_, words_;  ///< what is left of a run; count 0: no run is left
  BlockWindow window_;
  const int4* next_;
  std::int32_t left_;  ///< runs left from there on
};

/// The first entry of a block; for a block that does not exist, a place beyond the sequence.
__device__ __forceinline__ Int3 origin_of(const Cut& cut, std::int32_t block) {
  const auto& grid = cut.grid;
  if (cut.plain) return {{0, 0, block * 64}};
  if (block >= cut.blocks) return {{0, 0, grid.size[2]}};
  auto rest = static_cast<unsigned>(block);
  Int3 origin{};
#pragma unroll
  for (int i = 2; i >= 0; --i) {
    const auto blocks = cut.by_blocks[i].divisor, chunks = cut.by_chunks[i].divisor;
    const auto row = cut.by_blocks[i].quotient(rest), at = rest - row * blocks;
    const auto residue = cut.by_chunks[i].quotient(at);
    origin[i] = static_cast<std::int32_t>(residue + (at - residue * chunks) * grid.extent[i] * grid.step[i]);
    rest = row;
  }
  return origin;
}

/// The coordinates of a block's beginning on the axes of a map after the channels.
struct MapPlace {
  std::int32_t v[4];
  __device__ __forceinline__ std::int32_t operator[](int i) const { return v[i]; }
};
__device__ __forceinline__ MapPlace place_of(const RowMap& rows, Int3 origin, std::int32_t h, std::int32_t b) {
  if (rows.log_step > 0) return {{origin[2] >> rows.log_step, origin[2] & ((1 << rows.log_step) - 1), h, b}};
  const bool joined = rows.heads > 0;
  return {{origin[2], origin[1], joined ? origin[0] : h, joined ? b * rows.heads + h : b}};
}

__device__ __forceinline__ void store_rows(const RowMap& rows, const void* from, int c, Int3 origin, std::int32_t h,
                                           std::int32_t b) {
  const auto at = place_of(rows, origin, h, b);
  store_box(&rows.map, from, c, at[0], at[1], at[2], at[3]);
}

}  // namespace anyflash::cuda
