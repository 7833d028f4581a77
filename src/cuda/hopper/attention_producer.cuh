// What thread blocks of attention.cuh have in shared memory, and the producer, a few warps: the first loads K and words by
// TMA, step by step, as far ahead as there are stages. The second loads V. The third takes tasks until there are none,
// loads Q and stores O.
#pragma once

#include "cuda/hopper/attention_args.h"
#include "cuda/portable/walk.cuh"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/runs.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace anyflash::cuda {

/// A query tile of head h. b and first_query -1: there are no more (kSplit: a packed head's first query may be negative).
/// steps: 1 if it has a key step to see; kSplit: plus twice the part.
template <bool kSplit>
struct alignas(16) AttentionTask {
  std::int32_t b, h, first_query, steps;
  __device__ __forceinline__ bool exists() const { return (kSplit ? b : first_query) >= 0; }
  __device__ __forceinline__ bool has_steps() const { return kSplit ? steps & 1 : steps > 0; }
  __device__ __forceinline__ std::int32_t part() const { return steps >> 1; }
  /// What warpgroup w has of it. Of packed heads (PackGQA) it has a head; its first query is such that rows count from
  /// the tile's first, as they do in a tile of one head. Without a head it has a block beyond the sequence.
  __device__ __forceinline__ AttentionTask of_warpgroup(const AttentionArgs& args, std::int32_t w) const {
    if (!kSplit || args.packs == 0) return *this;
    const bool has_head = h % args.group + w < args.group;
    return {b, has_head ? h + w : h, 64 * ((has_head ? 0 : args.query_cut.blocks) - w), steps};
  }
};
/// Notes whether the portable kernel has to make warpgroup w's query block of a task again.
template <bool kSplit>
__device__ __forceinline__ void note_block(const AttentionArgs& args, const AttentionTask<kSplit>& task, std::int32_t w,
                                           std::uint8_t again) {
  const auto block = task.first_query / 64 + w;
  if (!args.again_blocks || block >= args.query_cut.blocks) return;
  const auto at = (std::int64_t{task.b} * args.heads + task.h) * args.query_cut.blocks + block;
  args.again_blocks[kSplit ? at * args.parts + task.part() : at] = again;
}
/// What the producer tells of a step. Aligned, so that no load also reads what another barrier guards.
struct alignas(16) StepInfo {
  std::int32_t last;
  std::int32_t cells;  ///< a CellKind in two bits for each query and key block; 0: all pairs are seen
};
enum CellKind { kFullCell = 0, kPartialCell = 1, kHiddenCell = 2 };

template <class Traits>
struct AttentionShared {
  using E = typename Traits::E;

  using QueryTile = SharedTile<E, 64, Traits::kHeadSize>;
  using KeyTile = SharedTile<E, Traits::kKeys, Traits::kHeadSize>;

  QueryTile q[Traits::kQueryStages][Traits::kWarpgroups];
  KeyTile k[Traits::kStages], v[Traits::kStages];
  std::uint64_t words[Traits::kStages][Traits::kWarpgroups][Traits::kCells][64];  ///< come and go with K, as a bias
  alignas(Traits::kBiasBytes > 0 ? 1024 : 16) char bias[Traits::kBiasBytes > 0 ? Traits::kStages : 1]
                                                       [Traits::kBiasBytes > 0 ? Traits::kWarpgroups : 1]
                                                       [Traits::kBiasBytes > 0 ? 4096 * Traits::kBiasBytes : 16];
  StepInfo step[Traits::kStages];
  std::int32_t key_block[Traits::kStages];  ///< kGeneral: of a step
  AttentionTask<Traits::kSplit> task[Traits::kQueryStages][Traits::kWarpgroups];
  AttentionTask<Traits::kSplit> next_task[1];  ///< for the warp that loads K
  Pipeline<1> tasks;
  Pipeline<Traits::kQueryStages> queries[Traits::kWarpgroups];  ///< kBoxed: Q is released when O is in its place
  Pipeline<Traits::kStages> keys, values;
};

/// The key steps of a task by the plan's runs: kCells key blocks at a time that any of the task's query blocks visits.
/// They need not be neighbours. By a warp; lane w has what query block w's words are.
template <class Traits>
class PlannedSteps {
 public:
  static constexpr int kCells = Traits::kCells;
  static constexpr bool kWhole = Traits::kWarpgroups > 1;
  using Task = AttentionTask<Traits::kSplit>;
  using Runs = MergedRuns<Traits::kWarpgroups, 1, Traits::kSplit>;

  __device__ __forceinline__ explicit PlannedSteps(const AttentionArgs& args) : args_(args) {}
  __device__ __forceinline__ void open(const Task& task) {
    if (!task.exists()) return;
    list_ = &group_of(args_, task.b, task.h).keys_of_query_block;
    const auto lane = static_cast<std::int32_t>(lane_number()), blocks = args_.query_cut.blocks;
    const auto first = task.of_warpgroup(args_, lane).first_query / 64;
    const auto part = args_.first_block + task.part() * args_.part_blocks;
    runs_.open(*list_, first, blocks, {part, part + args_.part_blocks});
    exists_ = lane < Traits::kWarpgroups && first + lane < blocks;
    whole_ = kWhole ? runs_.template whole<kCells>(exists_) : 0;
  }
  __device__ __forceinline__ bool more() const { return runs_.more(); }

  struct Step {
    std::int32_t block[kCells];          ///< -1: none
    const std::uint64_t* words[kCells];  ///< this lane's; null: none
    unsigned cells;                      ///< CellKinds of this lane's query block
  };
  __device__ __forceinline__ Step next() {
    Step step;
    step.cells = 0;
    if (kWhole && whole_ > 0) {  // few instructions
      --whole_;
      const auto block = runs_.template pass_whole<kCells>(exists_);
#pragma unroll
      for (int c = 0; c < kCells; ++c) step.block[c] = block + c, step.words[c] = nullptr;
      return step;
    }
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      std::int32_t words[1];
      step.block[c] = runs_.find(words);
      step.words[c] = words[0] >= Runs::hidden ? nullptr
                      : words[0] < 0           ? args_.words + std::int64_t{~words[0]} * 64
                                               : list_->words + std::int64_t{words[0]} * 64;
      const unsigned kind = words[0] == Runs::full ? kFullCell : words[0] == Runs::hidden ? kHiddenCell : kPartialCell;
      if (exists_) step.cells |= kind << 2 * c;  // else nobody asks what is in the rows
    }
    whole_ = kWhole ? runs_.template whole<kCells>(exists_) : 0;
    return step;
  }
  __device__ __forceinline__ StepInfo info_of(const Step& step) const {
    const auto all = __reduce_or_sync(0xffffffffu, exists_ ? step.cells << 2 * kCells * lane_number() : 0u);
    return {!more(), static_cast<std::int32_t>(all)};
  }

 private:
  const AttentionArgs& args_;
  const DeviceRuns* list_;
  Runs runs_;
  std::int32_t whole_;  ///< steps that come next and that all query blocks see whole
  bool exists_;         ///< this lane's query block
};

template <class Traits>
class AttentionProducer {
 public:
  using Shared = AttentionShared<Traits>;
  using Task = AttentionTask<Traits::kSplit>;
  using KeyTile = typename Shared::KeyTile;
  static constexpr int kD = Traits::kHeadSize, kN = Traits::kKeys, kM = Traits::kQueries;
  static constexpr int kWarpgroups = Traits::kWarpgroups, kCells = Traits::kCells;
  using State = PipelineState<Traits::kStages>;
  using QueryState = PipelineState<Traits::kQueryStages>;
  using Step = typename PlannedSteps<Traits>::Step;

  __device__ __forceinline__ AttentionProducer(const AttentionArgs& args, Shared& shared)
      : args_(args),
        shared_(shared),
        steps_(args),
        tasks_(args.masks_on_device && *args.again == kAllAgain ? 0 : args.tasks),
        bias_boxes_(args.bias.data ? args.bias.type == 2 ? 2 : 1 : 0) {}

  /// One warp loads K. The next task is asked for when it releases one: `early`, for the answer takes a microsecond; of
  /// few tasks, that would spoil the balance.
  __device__ __forceinline__ void load_all_keys() {
    for (;;) {
      shared_.tasks.wait_full(t_at_);
      const auto task = shared_.next_task[0];
      if (!task.exists()) return;
      steps_.open(task);
      if (args_.early || !steps_.more()) shared_.tasks.release(t_at_);
      while (steps_.more()) {
        const bool last = load_next_keys(task);
        if (last && !args_.early) shared_.tasks.release(t_at_);
      }
      t_at_.advance();
    }
  }
  /// Another one loads V, of each task after its Q.
  __device__ __forceinline__ void load_all_values() {
    for (;;) {
      shared_.queries[0].wait_full(q_at_);
      const auto task = shared_.task[q_at_.stage][0];
      shared_.queries[0].release(q_at_);
      q_at_.advance();
      if (!task.exists()) return;
      if (!task.has_steps()) continue;
      steps_.open(task);
      while (steps_.more()) load_values(task, steps_.next());
    }
  }
  /// Another one takes tasks and loads Q, as soon as its stage is free. kBoxed: that is when O, which lies where Q was,
  /// has been stored.
  __device__ __forceinline__ void load_all_queries() {
    for (int n = 0;; ++n) {
      shared_.tasks.wait_empty(t_at_);
      auto task = task_of(n == 0 ? static_cast<std::int32_t>(blockIdx.x) : claimed());
      if (leads()) shared_.next_task[0] = task, shared_.tasks.full[0].arrive();
      t_at_.advance();
      if (task.exists()) steps_.open(task), task.steps += steps_.more();
      for (int w = 0; w < kWarpgroups; ++w) {
        wait_queries(w, n >= Traits::kQueryStages);
        load_queries(task, w);
      }
      q_at_.advance();
      if (task.exists()) continue;
      for (int w = 0; w < kWarpgroups && Traits::kBoxed && n > 0; ++w) wait_queries(w, true);
      return;
    }
  }

 private:
  __device__ __forceinline__ static bool leads() { return lane_number() == 0; }
  /// The number of the next task, perhaps of none.
  __device__ __forceinline__ std::int32_t claimed() const {
    const auto answer = leads() ? atomicAdd(args_.next_task, 1) : 0;
    if (leads() && answer == args_.tasks - 1) *args_.next_task = 0;  // the last one that asks sets the counter back
    return static_cast<std::int32_t>(gridDim.x) + uniform(answer);
  }

  /// Task `index`, the last query tiles first, which are the longest under causal rules; the heads of a section take
  /// turns.
  __device__ __forceinline__ Task task_of(std::int32_t index) const {
    if (index >= tasks_) return {-1, 0, -1, 0};
    const auto parts = Traits::kSplit ? args_.parts : 1, steps = index % parts * 2;
    index /= parts;
    const auto all = args_.section_heads * args_.tiles, section = index / all, rest = index % all;
    const auto heads = min(args_.section_heads, args_.tasks / (args_.tiles * parts) - section * args_.section_heads);
    const auto head = section * args_.section_heads + rest % heads, first_query = (args_.tiles - 1 - rest / heads) * kM;
    if (!Traits::kSplit || args_.packs == 0) return {head / args_.heads, head % args_.heads, first_query, steps};
    const auto key_head = head / args_.packs, key_heads = args_.heads / args_.group;
    return {key_head / key_heads, key_head % key_heads * args_.group + head % args_.packs * kWarpgroups, 0, steps};
  }
  /// Of a warpgroup.
  __device__ __forceinline__ void load_queries(const Task& task, int w) {
    auto& full = shared_.queries[w].full[q_at_.stage];
    if (!leads()) return;
    const auto own = task.of_warpgroup(args_, w);
    shared_.task[q_at_.stage][w] = own;
    if (own.exists()) note_block(args_, own, w, 0);
    if (!task.has_steps()) return full.arrive();
    full.arrive_and_expect(64 * kD * 2);
    load_query_block(shared_.q[q_at_.stage][w], own, own.first_query + 64 * w, full);
  }
  /// Waits until a warpgroup's Q may be loaded. kBoxed: stores O of the task whose Q was there.
  __device__ __forceinline__ void wait_queries(int w, bool stores) {
    shared_.queries[w].wait_empty(q_at_);
    if (!Traits::kBoxed || !stores) return;
    const auto task = shared_.task[q_at_.stage][w];
    const auto block = task.first_query / 64 + w;
    if (task.has_steps() && leads() && block < args_.query_cut.blocks) {
      const auto at = place_of(args_.out_map, origin_of(args_.query_cut, block), task.h, task.b);
      const auto* const from = shared_.q[q_at_.stage][w].data;
#pragma unroll
      for (int c = 0; c < kD; c += 64) store_box(&args_.out_map.map, from + c * 64, c, at[0], at[1], at[2], at[3]);
      stores_commit();
      stores_read();
    }
    __syncwarp();
  }
  /// Is it the task's last step?
  __device__ __forceinline__ bool load_next_keys(const Task& task) {
    const auto step = steps_.next();
    const StepInfo info = steps_.info_of(step);
    load_keys(task, step, info);
    return info.last;
  }
  __device__ __forceinline__ void load_keys(const Task& task, const Step& step, const StepInfo& info) {
    shared_.keys.wait_empty(k_at_);
    auto& full = shared_.keys.full[k_at_.stage];
    int word_bytes = 0;
#pragma unroll
    for (int c = 0; c < kCells; ++c) word_bytes += 512 * __popc(__ballot_sync(0xffffffffu, step.words[c] != nullptr));
    const bool bias = Traits::kGeneral && bias_boxes_ > 0 && visits(info);
    const int bias_bytes = Traits::kGeneral ? 8192 * bias_boxes_ * __popc(__ballot_sync(0xffffffffu, bias)) : 0;
    if (leads()) {
      shared_.step[k_at_.stage] = info;
      if constexpr (Traits::kGeneral) shared_.key_block[k_at_.stage] = step.block[0];
      full.arrive_and_expect(KeyTile::kBytes + word_bytes + bias_bytes);
    }
    load_step(shared_.k[k_at_.stage], args_.k, args_.k_block, step, task, full);
#pragma unroll
    for (int c = 0; c < kCells; ++c)
      if (step.words[c]) copy_bytes(shared_.words[k_at_.stage][lane_number()][c], step.words[c], 512, full);
    if constexpr (Traits::kGeneral)
      if (bias) load_bias(task, step.block[0], full);
    k_at_.advance();
  }
  __device__ __forceinline__ void load_values(const Task& task, const Step& step) {
    shared_.values.wait_empty(v_at_);
    auto& full = shared_.values.full[v_at_.stage];
    if (leads()) full.arrive_and_expect(KeyTile::kBytes);
    load_step(shared_.v[v_at_.stage], args_.v, args_.v_block, step, task, full);
    v_at_.advance();
  }
  /// Does the query block of this lane see the key block of a step?
  __device__ __forceinline__ static bool visits(const StepInfo& info) {
    const auto w = lane_number();
    return w < kWarpgroups && (info.cells >> 2 * w & 3) != kHiddenCell;
  }
  /// Of this lane's query block. A bias that all queries, heads or batch entries share has one of them.
  __device__ __forceinline__ void load_bias(const Task& task, std::int32_t key_block, Barrier& full) const {
    const auto w = static_cast<std::int32_t>(lane_number()), query = args_.bias.query ? task.first_query + 64 * w : 0;
    for (int n = 0; n < bias_boxes_; ++n)
      copy_box(shared_.bias[k_at_.stage][w] + n * 8192, &args_.bias_map, key_block * 64 + n * 32, query,
               args_.bias.head ? task.h : 0, args_.bias.batch ? task.b : 0, 0, full);
  }
  __device__ __forceinline__ void load_query_block(typename Shared::QueryTile& to, const Task& task, std::int32_t row,
                                                   Barrier& full) const {
    for_query_block(row / 64, task, [&](const auto& at, int c) {
      copy_box(to.data + c * 64, &args_.q.map, c, at[0], at[1], at[2], at[3], full);
    });
  }
  template <class Box>
  __device__ __forceinline__ void for_query_block(std::int32_t block, const Task& task, const Box& box) const {
    const auto at = place_of(args_.q, origin_of(args_.query_cut, block), task.h, task.b);
#pragma unroll
    for (int c = 0; c < kD; c += 64) box(at, c);
  }
  __device__ __forceinline__ void load_step(KeyTile& to, const RowMap& rows, const RowMap& block_rows, const Step& step,
                                            const Task& task, Barrier& full) const {
    __syncwarp();  // bytes are expected before they come
    for_boxes(rows, block_rows, step, task, [&](const CUtensorMap* map, int offset, int c, const MapPlace& at) {
      copy_box(to.data + offset, map, c, at[0], at[1], at[2], at[3], full);
    });
  }
  /// Key blocks that follow one another are one box: two of half the size made the whole kernel 13 % slower.
  template <class Box>
  __device__ __forceinline__ void for_boxes(const RowMap& rows, const RowMap& block_rows, const Step& step,
                                            const Task& task, const Box& box) const {
    const auto head = task.h / args_.group;
    bool neighbours = args_.key_cut.plain;
#pragma unroll
    for (int c = 1; c < kCells; ++c) neighbours &= step.block[c] == step.block[0] + c;
    if (!neighbours) {
      for_blocks(block_rows, step, head, task.b, box);
    } else if (leads()) {
#pragma unroll
      for (int c = 0; c < kD; c += 64) box(&rows.map, c * kN, c, MapPlace{{64 * step.block[0], 0, head, task.b}});
    }
  }
  /// A box of 64 channels of one block for each of the first lanes. Of no block: zeros from beyond the sequence.
  template <class Box>
  __device__ __forceinline__ void for_blocks(const RowMap& rows, const Step& step, std::int32_t head, std::int32_t b,
                                             const Box& box) const {
    constexpr int kPanels = kD / 64;
    const int lane = static_cast<int>(lane_number()), cell = lane / kPanels, c = lane % kPanels * 64;
    if (cell >= kCells) return;
    auto block = step.block[0];
#pragma unroll
    for (int i = 1; i < kCells; ++i) block = cell == i ? step.block[i] : block;
    const auto at = place_of(rows, origin_of(args_.key_cut, block < 0 ? args_.key_cut.blocks : block), head, b);
    box(&rows.map, c * kN + cell * 4096, c, at);
  }

  const AttentionArgs& args_;
  Shared& shared_;
  PlannedSteps<Traits> steps_;
  const std::int32_t tasks_;
  const int bias_boxes_;  ///< of a query block and a key block
  State k_at_, v_at_;
  QueryState q_at_;
  PipelineState<1> t_at_;
};

}  // namespace anyflash::cuda
