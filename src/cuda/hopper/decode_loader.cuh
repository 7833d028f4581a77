// Shared memory of Hopper's decoding kernels, and their producer warps. One issues TMA loads of keys and values, as far
// ahead as there are stages. Where a tile may span many pages there are two, one for K and one for V, because the lanes
// of a warp issue loads one after the other; but in GroupDecodeRows the second one finds mask words.
#pragma once

#include "cuda/hopper/decode_args.h"
#include "cuda/portable/decode_shared.cuh"
#include "cuda/tile/pipeline.cuh"

namespace anyflash::cuda {

/// A warp takes 16 keys of a tile.
template <class E, int depth, int warps, int stages>
struct BulkDecodeSizes {
  using Element = E;
  static constexpr int kDepth = depth, kKeyWarps = warps, kStages = stages, kKeys = 16 * warps, kRows = 8;
  static constexpr int kWarps = warps, kTileWarps = warps, kThreads = 32 * (kWarps + 2);
  static constexpr bool kMasks = false;
  static_assert(kKeys % 64 == 0);
};

/// Two numbers as one operand.
template <class E>
__device__ __forceinline__ std::uint32_t pair_of(E a, E b) {
  return *reinterpret_cast<const std::uint16_t*>(&a) |
         static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(&b)) << 16;
}

/// A tile of GroupDecodeRows: so many keys from `first` on. partial: rows have mask words. last: of the warpgroup's.
/// none: the task has no keys.
struct alignas(16) GroupTile {
  std::int32_t first, keys;
  bool partial, last, none;
};

template <class Sizes>
struct BulkDecodeShared {
  using E = typename Sizes::Element;
  using T = float;
  static constexpr int kTile = Sizes::kKeys * Sizes::kDepth, kKeyWarps = Sizes::kKeyWarps;
  alignas(1024) E k[Sizes::kStages][kTile];  ///< panels of 64 channels of all keys, swizzled
  alignas(1024) E v[Sizes::kStages][kTile];
  T largest[kKeyWarps][Sizes::kRows], sum[kKeyWarps][Sizes::kRows], weight[kKeyWarps][Sizes::kRows];
  bool seen[kKeyWarps][Sizes::kRows];
  GroupTile tile[Sizes::kMasks ? Sizes::kStages : 1];
  Pipeline<Sizes::kStages> tiles;
  Pipeline<kKeyWarps> partial_tiles;  ///< their words, of each warpgroup's

  /// Called by one thread, before a barrier of the thread block.
  __device__ __forceinline__ void begin(int loading_warps) {
    tiles.init(Sizes::kTileWarps, loading_warps);
    if constexpr (Sizes::kMasks) partial_tiles.init(Sizes::kTileWarps, Barrier::kLanes);
    barriers_begun();
  }
  /// Of the rows, for one partial tile of a warpgroup at a time; where statistics will be.
  __device__ __forceinline__ rules::Word* words(int group) {
    return reinterpret_cast<rules::Word*>(largest) + group * Sizes::kRows;
  }
  static_assert(sizeof(rules::Word[kKeyWarps][Sizes::kRows]) <= sizeof(largest) + sizeof(sum) + sizeof(weight));
  /// Over the tiles; padded against bank conflicts.
  using Results = T[kKeyWarps][Sizes::kRows][Sizes::kDepth + 8];
  __device__ __forceinline__ Results& results() { return *reinterpret_cast<Results*>(k); }
  static_assert(sizeof(Results) <= sizeof(k) + sizeof(v));
};

/// How many of the producer warps load; the others exit, or find words.
template <class Sizes>
__device__ __forceinline__ int loading_warps(const BulkDecodeArgs& args) {
  return args.call.paged && !Sizes::kMasks ? 2 : 1;
}

/// Shared: has k, v and tile of each stage, and tiles, their pipeline.
template <class Sizes, class Shared>
class BulkDecodeLoader {
 public:
  static constexpr int kDepth = Sizes::kDepth, kKeys = Sizes::kKeys, kStages = Sizes::kStages;

  __device__ __forceinline__ BulkDecodeLoader(const BulkDecodeArgs& args, Shared& shared, int warp)
      : args_(args),
        shared_(shared),
        warp_(warp),
        log_boxes_(rules::lowest_bit(kKeys / args.box_rows)),
        jumps_(args.masked && !args.in_a_row) {}

  __device__ __forceinline__ void run() {
    // A lane's boxes are always the same rows and channels of a tile, of one of the two tensors.
    const int lane = static_cast<int>(lane_number()), boxes = 1 << log_boxes_;
    const int of_both = (lane >> log_boxes_) + warp_ * kPanels;  // K's panels, then V's
    const int box = lane & (boxes - 1), panel = of_both % kPanels, tensor = of_both / kPanels;
    const bool own = Sizes::kMasks || !args_.call.paged ? tensor < 2 : tensor == warp_;
    const bool one_entry = args_.one_entry[tensor & 1], one_head = args_.one_head[tensor & 1];
    const auto policy = read_once();
    const auto place = static_cast<std::int64_t>(panel) * kKeys * 64 + box * args_.box_rows * 64;
    // Box n of the task is this tile's first.
    const auto load = [&](const DecodeTask& task, const GroupTile& tile, int end, int n) {
      std::int32_t row = tile.first + box * args_.box_rows, entry = task.b;
      const bool exists = own && row < end;
      if (args_.call.paged) {
        entry = __shfl_sync(0xffffffffu, now_.page, n % 32 + box);
        row = __shfl_sync(0xffffffffu, now_.row, n % 32 + box);
      }
      const auto all = __ballot_sync(0xffffffffu, exists);
      shared_.tiles.wait_empty(at_);
      auto& full = shared_.tiles.full[at_.stage];
      if (lane == 0) {
        if (Sizes::kMasks) shared_.tile[at_.stage] = tile;
        full.arrive_and_expect(__popc(all) * args_.box_rows * 128);
      }
      __syncwarp();
      if (exists) {
        copy_box((tensor == 0 ? shared_.k : shared_.v)[at_.stage] + place, &args_.maps[tensor].map,
                 panel * 64 + (tensor == 1 ? task.first_value : 0), row, 0, one_head ? 0 : task.head,
                 one_entry ? 0 : entry, full, policy);
      }
      at_.advance();
    };
    const DecodeTask task(args_, static_cast<std::int32_t>(blockIdx.x), Sizes::kRows, kDepth);
    // What is not in memory is computed before the previous kernel is done, and lengths and pages come to the L2.
    const bool in_memory = args_.lengths.data || args_.length_in_mask || args_.call.paged || jumps_;
    const std::int32_t first_key = (args_.first_block + task.part * args_.part_blocks) * 64;
    if (args_.lengths.data) prefetch(args_.lengths.address(task.b));
    if (args_.call.paged && !jumps_) {
      const auto at = first_key + lane * args_.box_rows;
      if (at < args_.keys) prefetch(args_.call.pages.address(task.b, at / args_.call.pages.page_size));
    }
    if (in_memory) wait_for_kernel_before();
    // Read together with the length, so pages behind the last key are read too.
    const auto most = args_.length_in_mask ? decode_keys(args_, task.b) : args_.keys;
    if (args_.call.paged && !jumps_) now_ = page_of(task, {first_key, most}, lane);
    int n = 0;  // of the tile's first box in the task
    if constexpr (Sizes::kMasks) {
      const auto size = decode_keys(args_, task.b);
      auto walk = walk_of_task(args_, task, size, jumps_);
      auto ahead = walk;  // at the warpgroup's next tile
      for (int group = 0; group < Sizes::kKeyWarps; ++group) ahead.step();
      if (!in_memory) wait_for_kernel_before();
      const bool none = !walk.more();
      // At least one tile for each warpgroup, perhaps without keys.
      for (int number = 0; number < Sizes::kKeyWarps || walk.more(); ++number, n += jumps_ ? 0 : boxes) {
        const int first = walk.block * kKeys, keys = walk.more() ? max(min(kKeys, size - first), 0) : 0;
        const GroupTile tile = {first, keys, is_partial(walk, word_of_keys<kKeys>(args_, first, size), jumps_),
                                !ahead.more(), none};
        walk.step(), ahead.step();
        look_up_pages(task, {first - n * args_.box_rows, jumps_ ? first + keys : size}, n);
        load(task, tile, first + keys, n);
      }
    } else {
      const auto span = span_of(args_, task);
      if (!in_memory) wait_for_kernel_before();
      for (int first = span.first; first < span.end; first += kKeys, n += boxes) {
        look_up_pages(task, span, n);
        load(task, {first}, span.end, n);
      }
    }
  }

  /// By another warp of GroupDecodeRows: the mask words of partial tiles.
  __device__ __forceinline__ void find_words() {
    const DecodeTask task(args_, static_cast<std::int32_t>(blockIdx.x), Sizes::kRows, kDepth);
    wait_for_kernel_before();
    const auto size = decode_keys(args_, task.b);
    int group = 0;
    unsigned phases = 0;  // a bit of each warpgroup
    for (auto walk = walk_of_task(args_, task, size, args_.masked); walk.more(); walk.step()) {
      const auto word = word_of_keys<kKeys>(args_, walk.block * kKeys, size);
      if (is_partial(walk, word, args_.masked)) {
        shared_.partial_tiles.wait_empty({group, phases >> group & 1});
        for (int row = 0; row < Sizes::kRows; row += 32)
          find_words_of_rows<32>(args_, task, row, walk, word, shared_.words(group) + row);
        release(shared_.partial_tiles.full[group]);
        phases ^= 1u << group;
      }
      group = group + 1 < Sizes::kKeyWarps ? group + 1 : 0;
    }
  }

 private:
  static constexpr int kPanels = kDepth / 64;
  static_assert(kKeys / 64 * kPanels * 2 <= 32, "a lane for each box");
  static_assert(kKeys / 16 * kPanels <= 32, "a lane for each box of the smallest pages");

  /// The place of a box of a task.
  struct Place {
    std::int32_t page, row;
  };
  /// Of the boxes from n on, of the span's first key on; 32 are looked up ahead.
  __device__ __forceinline__ void look_up_pages(const DecodeTask& task, const DecodeSpan& span, int n) {
    if (!args_.call.paged || n % 32 != 0) return;
    const int lane = static_cast<int>(lane_number());
    if (n > 0) now_ = next_;
    else if (jumps_) now_ = page_of(task, span, lane);
    if (!jumps_) next_ = page_of(task, span, n + 32 + lane);
  }
  __device__ __forceinline__ Place page_of(const DecodeTask& task, const DecodeSpan& span, int n) const {
    const auto& pages = args_.call.pages;
    const auto key = span.first + n * args_.box_rows;
    if (key >= span.end) return {0, 0};
    const auto page = static_cast<unsigned>(key) / static_cast<unsigned>(pages.page_size);
    return {static_cast<std::int32_t>(pages.at(task.b, static_cast<std::int32_t>(page))),
            key - static_cast<std::int32_t>(page) * pages.page_size};
  }

  const BulkDecodeArgs& args_;
  Shared& shared_;
  const int warp_;       ///< the number of the producer warp
  const int log_boxes_;  ///< of a tile's rows
  const bool jumps_;     ///< visited blocks are known from memory only
  Place now_, next_;     ///< lane n has box n of 32
  PipelineState<Sizes::kStages> at_;
};

}  // namespace anyflash::cuda
