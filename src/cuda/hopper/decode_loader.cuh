// Shared memory of Hopper's decoding kernels, and their producer warps. These issue TMA loads of keys and values, tile
// by tile, as far ahead as there are stages, through all tasks of their thread block. There is one such warp. Where a
// tile may span many pages there are two, one for K and one for V, because the lanes of a warp issue loads one after
// the other.
#pragma once

#include "cuda/hopper/decode_args.h"
#include "cuda/portable/decode_shared.cuh"
#include "cuda/tile/pipeline.cuh"

namespace anyflash::cuda {

/// A warp takes 16 keys of a tile, or row_warps warps do, each with 8 * groups rows. join_rows: how many rows of the
/// warps' results are joined at a time; 0: all, over the tiles of a thread block with one task. registers: 0, or those
/// of a consumer thread, taken from a producer warpgroup.
template <class E, int depth, int groups, int row_warps, int key_warps, int stages, int join_rows, int registers = 0>
struct BulkDecodeSizes {
  using Element = E;
  static constexpr int kDepth = depth, kGroups = groups, kKeyWarps = key_warps;
  static constexpr int kStages = stages, kKeys = 16 * key_warps, kRows = 8 * groups * row_warps;
  static constexpr int kWarps = row_warps * key_warps, kRegisters = registers;
  static constexpr bool kOneTask = join_rows == 0;
  static constexpr int kJoinRows = kOneTask ? kRows : join_rows;
  static constexpr int kThreads = 32 * (kWarps + (registers > 0 ? 4 : 2)), kLoaderRegisters = 40;
  static_assert(kKeys % 64 == 0 && kRows % kJoinRows == 0 && (registers == 0 || kWarps % 4 == 0));
};

/// Two numbers as one operand.
template <class E>
__device__ __forceinline__ std::uint32_t pair_of(E a, E b) {
  return *reinterpret_cast<const std::uint16_t*>(&a) |
         static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(&b)) << 16;
}

template <class Sizes>
struct BulkDecodeShared {
  using E = typename Sizes::Element;
  using T = float;
  static constexpr int kTile = Sizes::kKeys * Sizes::kDepth, kKeyWarps = Sizes::kKeyWarps;
  alignas(1024) E k[Sizes::kStages][kTile];  ///< panels of 64 channels of all keys, swizzled
  alignas(1024) E v[Sizes::kStages][kTile];
  using Results = T[kKeyWarps][Sizes::kJoinRows][Sizes::kDepth + 8];  ///< padded against bank conflicts
  alignas(16) char own_results[Sizes::kOneTask ? 16 : sizeof(Results)];
  T largest[kKeyWarps][Sizes::kRows], sum[kKeyWarps][Sizes::kRows], weight[kKeyWarps][Sizes::kRows];
  bool seen[kKeyWarps][Sizes::kRows];
  Pipeline<Sizes::kStages> tiles;

  /// Called by one thread, before a barrier of the thread block.
  __device__ __forceinline__ void begin(int loading_warps) {
    tiles.init(Sizes::kWarps, loading_warps);
    barriers_begun();
  }
  __device__ __forceinline__ Results& results() {
    return *reinterpret_cast<Results*>(Sizes::kOneTask ? reinterpret_cast<char*>(k) : own_results);
  }
  static_assert(!Sizes::kOneTask || sizeof(Results) <= sizeof(k));
};

/// How many of the producer warps are used; the others exit.
__device__ __forceinline__ int loading_warps(const BulkDecodeArgs& args) { return args.call.paged ? 2 : 1; }

/// Shared: has k, v, full and empty of each stage.
template <class Sizes, class Shared>
class BulkDecodeLoader {
 public:
  static constexpr int kDepth = Sizes::kDepth, kKeys = Sizes::kKeys, kStages = Sizes::kStages;

  __device__ __forceinline__ BulkDecodeLoader(const BulkDecodeArgs& args, Shared& shared, int warp)
      : args_(args), shared_(shared), warp_(warp), log_boxes_(rules::lowest_bit(kKeys / args.box_rows)) {}

  __device__ __forceinline__ void run() {
    // A lane's boxes are always the same rows and channels of a tile, of one of the two tensors.
    const int lane = static_cast<int>(lane_number()), boxes = 1 << log_boxes_;
    const int of_both = (lane >> log_boxes_) + warp_ * kPanels;  // K's panels, then V's
    const int box = lane & (boxes - 1), panel = of_both % kPanels, tensor = of_both / kPanels;
    const bool own = loading_warps(args_) == 2 ? tensor == warp_ : tensor < 2;
    const bool one_entry = args_.one_entry[tensor & 1], one_head = args_.one_head[tensor & 1];
    const auto policy = read_once();
    const auto place = static_cast<std::int64_t>(panel) * kKeys * 64 + box * args_.box_rows * 64;
    for (auto number = blockIdx.x; number < static_cast<unsigned>(args_.tasks); number += gridDim.x) {
      const DecodeTask task(args_, static_cast<std::int32_t>(number), Sizes::kRows, kDepth);
      // What is not in memory is computed before the previous kernel is done.
      const bool lengths = args_.lengths.data || args_.length_in_mask;
      if (lengths) wait_for_kernel_before();
      const auto span = span_of(args_, task);
      if (!lengths) wait_for_kernel_before();
      const int channel = panel * 64 + (tensor == 1 ? task.first_value : 0);
      if (args_.call.paged) next_ = page_of(task, span, lane);
      int n = 0;  // of the tile's first box in the task
      for (int first = span.first; first < span.end; first += kKeys, n += boxes) {
        std::int32_t row = first + box * args_.box_rows, entry = task.b;
        const bool exists = own && row < span.end;
        if (args_.call.paged) {
          if (n % 32 == 0) now_ = next_, next_ = page_of(task, span, n + 32 + lane);
          entry = __shfl_sync(0xffffffffu, now_.page, n % 32 + box);
          row = __shfl_sync(0xffffffffu, now_.row, n % 32 + box);
        }
        const auto all = __ballot_sync(0xffffffffu, exists);
        shared_.tiles.wait_empty(at_);
        auto& full = shared_.tiles.full[at_.stage];
        if (lane == 0) full.arrive_and_expect(__popc(all) * args_.box_rows * 128);
        __syncwarp();
        if (exists) {
          copy_box((tensor == 0 ? shared_.k : shared_.v)[at_.stage] + place, &args_.maps[tensor].map, channel, row, 0,
                   one_head ? 0 : task.head, one_entry ? 0 : entry, full, policy);
        }
        at_.advance();
      }
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
  Place now_, next_;     ///< lane n has box n of 32
  PipelineState<Sizes::kStages> at_;
};

}  // namespace anyflash::cuda
