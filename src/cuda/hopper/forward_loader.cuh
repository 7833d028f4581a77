// Shared memory of Hopper's forward kernel, and its producer warp. It takes tasks until there are none. For each task
// it issues TMA loads of the queries, then, tile by tile, of keys, values, mask words and biases. It runs as far ahead
// as there are stages, also beyond a task's end.
#pragma once

#include <type_traits>

#include "cuda/common/split_bf16.cuh"
#include "cuda/hopper/forward_args.h"
#include "cuda/hopper/split_bf16.h"
#include "cuda/hopper/tiles.cuh"
#include "cuda/portable/walk.cuh"

namespace anyflash::cuda {

/// The operand type of products: bfloat16 terms for float32.
template <class E>
using OperandOf = std::conditional_t<std::is_same_v<E, float>, __nv_bfloat16, E>;

/// blocks: query blocks of a task, each with a consumer warpgroup. registers: per consumer thread; loader_registers:
/// per producer thread. parts: operands that sum to one number.
template <class E, int parts, int depth, bool general, int blocks, int stages, int registers, int loader_registers,
          int bias_bytes>
struct GroupForwardSizes {
  using Element = E;
  using Operand = OperandOf<E>;
  static constexpr int kParts = parts, kDepth = depth, kBlocks = blocks, kStages = stages, kRegisters = registers;
  static constexpr int kLoaderRegisters = loader_registers;
  static constexpr int kThreads = 128 * (blocks + 1);
  static constexpr bool kGeneral = general;                    ///< scores need more than a positive scale
  static constexpr bool kApart = stages < 3 && depth <= 128;   ///< keys and values have barriers of their own
  static constexpr int kBiasBytes = general ? bias_bytes : 0;  ///< of the largest type of a bias
  /// Results have shared memory of their own, so that the next queries can be loaded meanwhile.
  static constexpr bool kOwnResults = depth <= 128 && kParts == 1;
  static constexpr bool kHeld = depth * kParts <= 192;  ///< Q is in registers
};

template <class Sizes>
struct GroupForwardShared {
  using E = typename Sizes::Operand;
  static constexpr int kBlocks = Sizes::kBlocks, kStages = Sizes::kStages;
  static constexpr int kTile = 64 * Sizes::kDepth * Sizes::kParts;  ///< one operand part after another
  static constexpr int kBias = 4096 * Sizes::kBiasBytes;
  static constexpr std::int32_t last = 1 << 30;

  alignas(1024) E q[kBlocks][kTile];
  alignas(1024) E k[kStages][kTile];
  alignas(1024) E v[kStages][kTile];
  alignas(kBias > 0 ? 1024 : 16) char bias[kBias > 0 ? kStages : 1][kBias > 0 ? kBlocks : 1][kBias > 0 ? kBias : 16];
  alignas(Sizes::kOwnResults ? 1024 : 16) E results[Sizes::kOwnResults ? kBlocks : 1][Sizes::kOwnResults ? kTile : 8];
  Word words[kStages][kBlocks][64];
  std::int32_t tile[kStages];   ///< bit w: block w of the task visits it; 8 + w: it hides some pairs; or `last`
  alignas(16) std::int32_t b;   ///< the task; aligned, so that it is not read with other barriers' data
  std::int32_t h, first_block;  ///< first_block -1: no more tasks
  Barrier queries_full, queries_empty;
  Barrier keys_full[kStages], values_full[kStages];
  Barrier keys_empty[kStages], values_empty[kStages];  ///< values_empty is for both, unless kApart

  /// Called by one thread, before a barrier of the thread block.
  __device__ __forceinline__ void begin() {
    queries_full.begin(1), queries_empty.begin_for_warps(4 * kBlocks);
    for (int i = 0; i < kStages; ++i) {
      keys_full[i].begin(1), keys_empty[i].begin_for_warps(4 * kBlocks);
      values_full[i].begin(1), values_empty[i].begin_for_warps(4 * kBlocks);
    }
    barriers_begun();
  }
};

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

template <class Sizes>
class GroupForwardLoader {
 public:
  using Shared = GroupForwardShared<Sizes>;
  using E = typename Sizes::Operand;
  static constexpr int kDepth = Sizes::kDepth, kBlocks = Sizes::kBlocks, kStages = Sizes::kStages;
  static constexpr bool kSplit = Sizes::kParts > 1;
  static constexpr int kBytes = Shared::kTile * int(sizeof(E));  ///< of a tile

  __device__ __forceinline__ GroupForwardLoader(const GroupForwardArgs& args, Shared& shared)
      : args_(args), shared_(shared) {}

  __device__ __forceinline__ void run() {
    std::int32_t task = blockIdx.x;  // first tasks by block number, others from a counter
    if (args_.masks_on_device && uniform(*args_.not_finite) != 0) task = args_.tasks;
    for (unsigned n = 0;; ++n) {
      shared_.queries_empty.wait(n % 2 ^ 1);
      if (task >= args_.tasks) {
        if (leads()) shared_.first_block = -1, shared_.queries_full.arrive();
        return;
      }
      load_queries(task);
      if (leads()) task = static_cast<std::int32_t>(gridDim.x) + atomicAdd(args_.next_task, 1);
      load_tiles();
      task = __shfl_sync(0xffffffffu, task, 0);
    }
  }

 private:
  __device__ __forceinline__ void load_queries(std::int32_t task) {
    const auto at = place_of_task(args_, task);
    b_ = at.head / args_.heads, h_ = at.head % args_.heads;
    first_block_ = at.part * kBlocks;
    if (leads()) {
      shared_.b = b_, shared_.h = h_, shared_.first_block = first_block_;
      shared_.queries_full.arrive_and_expect(sizeof(shared_.q));
    }
    __syncwarp();
    if (const auto w = lane_number(); kSplit && w < kBlocks) {
      const auto block = min(first_block_ + static_cast<std::int32_t>(w), args_.query_blocks - 1);
      copy_split(shared_.q[w], 0, (std::int64_t{b_} * args_.heads + h_) * args_.query_blocks + block,
                 shared_.queries_full);
    } else if (w < kBlocks) {
      const auto origin = origin_of(args_.queries, first_block_ + w);
#pragma unroll
      for (int c = 0; c < kDepth; c += 64)
        copy_rows(shared_.q[w] + c * 64, args_.q_map, c, origin, h_, b_, shared_.queries_full);
    }
  }

  __device__ __forceinline__ void load_tiles() {
    const auto& group = group_of(args_, b_, h_);
    const auto key_head = h_ / args_.group_heads;
    const auto& list = group.keys_of_query_block;
    MergedRuns<kBlocks, 1> runs;
    runs.open(list, first_block_, args_.query_blocks);
    const int bias_copies = Sizes::kGeneral && args_.bias.data ? (args_.bias.type == 2 ? 2 : 1) : 0;
    for (;;) {
      std::int32_t words[1];
      const auto block = runs.find(words);
      const auto origin = origin_of(args_.keys, max(block, 0));  // early: nothing waits for it
      const auto visits = __ballot_sync(0xffffffffu, words[0] != runs.hidden);
      const auto partial = __ballot_sync(0xffffffffu, words[0] < runs.hidden);
      (Sizes::kApart ? shared_.keys_empty : shared_.values_empty)[stage_].wait(parity_ ^ 1);
      auto &keys_full = shared_.keys_full[stage_], &values_full = shared_.values_full[stage_];
      if (block < 0) break;
      const auto load = [&](E* to, const RowMap& map, int n, Barrier& full) {
        if constexpr (kSplit) {
          const auto heads = args_.heads / args_.group_heads;
          copy_split(to, n, (std::int64_t{b_} * heads + key_head) * args_.keys.blocks + block, full);
        } else {
          copy(to, map, origin, key_head, full);
        }
      };
      const auto load_values = [&] {
        values_full.arrive_and_expect(kBytes);
        load(shared_.v[stage_], args_.v_map, 2, values_full);
      };
      if (leads()) {
        shared_.tile[stage_] = static_cast<std::int32_t>(visits | partial << 8);
        keys_full.arrive_and_expect(kBytes + __popc(partial) * 512 + __popc(visits) * bias_copies * 8192);
        load(shared_.k[stage_], args_.k_map, 1, keys_full);
        if constexpr (!Sizes::kApart) load_values();
      }
      __syncwarp();
      const auto w = lane_number();
      if (words[0] < runs.hidden)
        copy_bytes(shared_.words[stage_][w],
                   words[0] < 0 ? args_.words + std::int64_t{~words[0]} * 64 : list.words + std::int64_t{words[0]} * 64,
                   512, keys_full);
      if constexpr (Sizes::kGeneral) {
        if (bias_copies > 0 && words[0] != runs.hidden) load_bias(w, block, bias_copies, keys_full);
      }
      if constexpr (Sizes::kApart) {
        shared_.values_empty[stage_].wait(parity_ ^ 1);
        if (leads()) load_values();
      }
      step();
    }
    if constexpr (Sizes::kApart) shared_.values_empty[stage_].wait(parity_ ^ 1);
    if (leads()) {
      shared_.tile[stage_] = Shared::last;
      shared_.keys_full[stage_].arrive();
      shared_.values_full[stage_].arrive();
    }
    step();
  }

  __device__ __forceinline__ void copy(E* to, const RowMap& rows, Int3 origin, std::int32_t head, Barrier& full) const {
#pragma unroll
    for (int c = 0; c < kDepth; c += 64) copy_rows(to + c * 64, rows, c, origin, head, b_, full);
  }
  /// Copies a block of q, k or v by its number, laid out as in split_bf16.h.
  __device__ __forceinline__ void copy_split(E* to, int n, std::int64_t block, Barrier& full) const {
    copy_bytes(to, args_.bf16_terms[n] + block * kBytes, kBytes, full);
  }
  __device__ __forceinline__ void load_bias(int w, std::int32_t key_block, int copies, Barrier& full) const {
    const auto query = args_.bias.query != 0 ? (first_block_ + w) * 64 : 0;
    for (int n = 0; n < copies; ++n)
      copy_box(shared_.bias[stage_][w] + n * 8192, &args_.bias_map, key_block * 64 + n * 32, query,
               args_.bias.head != 0 ? h_ : 0, args_.bias.batch != 0 ? b_ : 0, 0, full);
  }

  __device__ __forceinline__ static bool leads() { return lane_number() == 0; }
  __device__ __forceinline__ void step() {
    if (++stage_ == kStages) stage_ = 0, parity_ ^= 1;
  }

  const GroupForwardArgs& args_;
  Shared& shared_;
  std::int32_t b_, h_, first_block_;
  int stage_ = 0;
  unsigned parity_ = 0;
};

}  // namespace anyflash::cuda
