// How a loading warp walks tiles: the runs of neighbouring blocks of one side at once, so that what is loaded of the
// other side serves all of them; and where in the sequence a block begins.
#pragma once

#include "cuda/hopper/barriers.cuh"
#include "cuda/hopper/row_map.h"
#include "cuda/portable/args.h"
#include "rules/bits.h"

namespace anyflash::cuda {

using rules::Int3, rules::TileClass, rules::Word;

/// The runs of kBlocks neighbouring blocks, by a warp: lane w has block w's. A tile is kCells neighbouring blocks of
/// the other side.
template <int kBlocks, int kCells>
class MergedRuns {
 public:
  static constexpr std::int32_t full = 0x7fffffff, hidden = full - 1;

  __device__ __forceinline__ void open(const DeviceRuns& list, std::int32_t first_block, std::int32_t blocks) {
    const auto block = first_block + static_cast<std::int32_t>(lane_number());
    next_ = end_ = list.runs;
    if (lane_number() < kBlocks && block < blocks)
      next_ = list.runs + list.start[block], end_ = list.runs + list.start[block + 1];
    ahead_.count = 0;
    fetch();
    fetch();
  }

  /// The first block of the next tile that any of the blocks visits, -1 if there is none. words: of this lane's block
  /// and each of the tile's: as DeviceRun's, or one of the above.
  __device__ __forceinline__ std::int32_t find(std::int32_t (&words)[kCells]) {
    const auto block = __reduce_min_sync(0xffffffffu, run_.count > 0 ? run_.first / kCells * kCells : full);
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      words[cell] = hidden;
      if (run_.count == 0 || run_.first != block + cell) continue;
      words[cell] = run_.kind == TileClass::full ? full : run_.words;
      ++run_.first;
      if (run_.words < 0) --run_.words;  // those that are not in the table follow one another downwards
      if (--run_.count == 0) fetch();
    }
    return block == full ? -1 : block;
  }

 private:
  /// A run ahead, so that it is there when it is needed.
  __device__ __forceinline__ void fetch() {
    run_ = ahead_;
    ahead_.count = 0;
    if (next_ != end_) ahead_ = *next_++;
  }

  DeviceRun run_, ahead_;  ///< what is left of a run, and the next; count 0: there is none
  const DeviceRun *next_, *end_;
};

/// The first entry of a block; of one that does not exist, a place beyond the sequence.
__device__ __forceinline__ Int3 origin_of(const Cut& cut, std::int32_t block) {
  const auto& grid = cut.grid;
  if (cut.plain) return {{0, 0, block * 64}};
  if (block >= cut.blocks) return {{0, 0, grid.size[2]}};
  auto rest = static_cast<unsigned>(block);
  Int3 origin{};
#pragma unroll
  for (int i = 2; i >= 0; --i) {
    const auto chunks = static_cast<unsigned>(cut.chunks[i]), step = static_cast<unsigned>(grid.step[i]);
    const unsigned all = chunks * step;
    auto at = rest;
    rest = all == 1 ? rest : rest / all;
    at -= rest * all;
    const unsigned residue = step == 1 ? 0 : at / chunks;
    origin[i] = static_cast<std::int32_t>(residue + (at - residue * chunks) * grid.extent[i] * step);
    if (rest == 0) break;
  }
  return origin;
}

/// Copies 64 channels, from c on, of a block of rows.
__device__ __forceinline__ void copy_rows(void* to, const RowMap& rows, int c, Int3 origin, std::int32_t h,
                                          std::int32_t b, Barrier& barrier) {
  const bool joined = rows.heads > 0;
  copy_box(to, &rows.map, c, origin[2], origin[1], joined ? origin[0] : h, joined ? b * rows.heads + h : b, barrier);
}
__device__ __forceinline__ void store_rows(const RowMap& rows, const void* from, int c, Int3 origin, std::int32_t h,
                                           std::int32_t b) {
  const bool joined = rows.heads > 0;
  store_box(&rows.map, from, c, origin[2], origin[1], joined ? origin[0] : h, joined ? b * rows.heads + h : b);
}

}  // namespace anyflash::cuda
