// The forward pass on Hopper (sm_90a), bfloat16 and float16 (FlashAttention-3, Shah et al. 2024).
//
// A task is a query tile of a head, 64 rows for each consumer warpgroup, against all key steps that the tile visits.
// Thread blocks are persistent and take tasks, longest first, heads whose K and V share the L2 together.
// One producer warp loads Q, and K and V step by step, by TMA. A consumer warpgroup keeps S, P and O in registers and
// issues the next step's S = Q K^T together with this step's O += P V; its softmax runs while the tensor cores work for
// the other warpgroups, which issue one after the other. O leaves from registers.
// Bound by the tensor cores, at 64 channels by the exponentials too.
#pragma once

#include "cuda/tile/mask_words.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/setmaxnreg.cuh"

namespace anyflash::cuda {

enum class MaskKind { full, causal };

struct AttentionArgs {
  CUtensorMap q, k, v;  ///< 4-D: channels, sequence, heads, batch
  void* out;
  float* lse;
  std::int64_t out_row, out_head, out_batch;  ///< strides in elements
  std::int32_t heads, group, queries, keys;   ///< group: query heads of a key head
  std::int32_t diagonal;                      ///< query i sees keys 0 .. i + diagonal
  std::int32_t tiles, tasks, section_heads;   ///< query tiles of a head; heads claimed together
  std::int32_t* next_task;                    ///< 0 before and after a launch
  std::int32_t* not_finite;                   ///< becomes 1 if a result is not finite: all is then made again elsewhere
  float scale_log2;
};

/// kKeys: of a step. kStages, kQueryStages: of K and of V, of Q. kOrdered: warpgroups issue products one after the
/// other.
template <class E_, int kHeadSize_, int kKeys_, int kWarpgroups_, int kStages_, int kQueryStages_, MaskKind kMask_,
          bool kOrdered_ = true>
struct AttentionTraits {
  using E = E_;
  static constexpr int kHeadSize = kHeadSize_, kKeys = kKeys_, kWarpgroups = kWarpgroups_;
  static constexpr int kStages = kStages_, kQueryStages = kQueryStages_;
  static constexpr MaskKind kMask = kMask_;
  static constexpr bool kOrdered = kOrdered_;
  static constexpr int kQueries = 64 * kWarpgroups, kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 240 : 160;
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 24 : 32;
};

/// A query tile against `steps` key steps. first_query -1: there are no more.
struct alignas(16) Task {
  std::int32_t b, h, first_query, steps;
};
/// What the producer tells of a step. Aligned, so that no load also reads what another barrier guards.
struct alignas(16) StepInfo {
  std::int32_t last, partial, first_key;
};

template <class Traits>
struct AttentionShared {
  using E = typename Traits::E;
  SharedTile<E, 64, Traits::kHeadSize> q[Traits::kQueryStages][Traits::kWarpgroups];
  SharedTile<E, Traits::kKeys, Traits::kHeadSize> k[Traits::kStages], v[Traits::kStages];
  StepInfo step[Traits::kStages];
  Task task[Traits::kQueryStages];
  Pipeline<Traits::kQueryStages> queries;
  Pipeline<Traits::kStages> keys, values;
};

template <class Traits>
class Attention {
 public:
  using E = typename Traits::E;
  using Shared = AttentionShared<Traits>;
  static constexpr int kD = Traits::kHeadSize, kN = Traits::kKeys, kM = Traits::kQueries;
  static constexpr bool kLateFirstKey = Traits::kMask != MaskKind::full;  ///< a row's first key in a later step
  static constexpr int kWarpgroups = Traits::kWarpgroups, kStages = Traits::kStages;
  using State = PipelineState<kStages>;
  using QueryState = PipelineState<Traits::kQueryStages>;
  using Issue = IssueOrder<Traits::kOrdered ? kWarpgroups : 0, 1>;

  __device__ __forceinline__ Attention(const AttentionArgs& args, Shared& shared) : args_(args), shared_(shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      shared_.queries.init(4 * kWarpgroups);
      shared_.keys.init(4 * kWarpgroups), shared_.values.init(4 * kWarpgroups);
      barriers_begun();
    }
    __syncthreads();
    const unsigned warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == kWarpgroups) {
      setmaxnreg_dec<Traits::kProducerRegisters>();
      if (threadIdx.x == 128 * kWarpgroups) produce();
    } else {
      setmaxnreg_inc<Traits::kConsumerRegisters>();
      consume(warpgroup);
    }
  }

 private:
  // --- Producer ------------------------------------------------------------------------------------------------------

  /// K and V go through a task and on into the next one in the order in which the consumers wait for them.
  __device__ __forceinline__ void produce() {
    State k_at, v_at;
    QueryState q_at;
    auto task = task_of(blockIdx.x);
    load_keys(task, 0, k_at);
    load_queries(task, q_at);
    while (task.first_query >= 0) {
      // The next task is asked for a step ahead: the answer takes a microsecond. Earlier would spoil the balance.
      std::int32_t claimed = 0;
      if (task.steps < 2) claimed = atomicAdd(args_.next_task, 1);
      for (std::int32_t i = 0; i + 1 < task.steps; ++i) {
        if (i + 2 == task.steps) claimed = atomicAdd(args_.next_task, 1);
        load_keys(task, i + 1, k_at);
        load_values(task, i, v_at);
      }
      if (claimed == args_.tasks - 1) *args_.next_task = 0;  // the last thread block that asks sets the counter back
      const auto next = task_of(static_cast<std::int32_t>(gridDim.x) + claimed);
      load_keys(next, 0, k_at);
      load_values(task, task.steps - 1, v_at);
      load_queries(next, q_at);
      task = next;
    }
  }
  /// Task `index`, longest first; the heads of a section take turns.
  __device__ __forceinline__ Task task_of(std::int32_t index) const {
    if (index >= args_.tasks) return {0, 0, -1, 0};
    const auto all = args_.section_heads * args_.tiles, section = index / all, rest = index % all;
    const auto heads = min(args_.section_heads, args_.tasks / args_.tiles - section * args_.section_heads);
    const auto head = section * args_.section_heads + rest % heads;
    const auto first_query = (args_.tiles - 1 - rest / heads) * kM;
    auto end = args_.keys;  // of the keys that the tile's last query sees
    if constexpr (Traits::kMask == MaskKind::causal)
      end = min(end, min(first_query + kM, args_.queries) + args_.diagonal);
    return {head / args_.heads, head % args_.heads, first_query, end > 0 ? (end + kN - 1) / kN : 0};
  }
  __device__ __forceinline__ void load_queries(const Task& task, QueryState& at) {
    shared_.queries.wait_empty(at);
    auto& full = shared_.queries.full[at.stage];
    shared_.task[at.stage] = task;
    if (task.steps == 0) {
      full.arrive();
    } else {
      full.arrive_and_expect(kM * kD * 2);
#pragma unroll
      for (int w = 0; w < kWarpgroups; ++w)
#pragma unroll
        for (int c = 0; c < kD; c += 64)
          copy_box_4d(shared_.q[at.stage][w].data + c * 64, args_.q, c, task.first_query + 64 * w, task.h, task.b,
                      full);
    }
    at.advance();
  }
  __device__ __forceinline__ void load_keys(const Task& task, std::int32_t i, State& at) {
    if (i >= task.steps) return;
    shared_.keys.wait_empty(at);
    bool partial = (i + 1) * kN > args_.keys;
    if constexpr (Traits::kMask == MaskKind::causal) partial |= (i + 1) * kN > task.first_query + args_.diagonal + 1;
    shared_.step[at.stage] = {i + 1 == task.steps, partial, i * kN};
    load(shared_.k[at.stage], args_.k, i * kN, task.h / args_.group, task.b, shared_.keys.full[at.stage]);
    at.advance();
  }
  __device__ __forceinline__ void load_values(const Task& task, std::int32_t i, State& at) {
    if (i < 0) return;
    shared_.values.wait_empty(at);
    load(shared_.v[at.stage], args_.v, i * kN, task.h / args_.group, task.b, shared_.values.full[at.stage]);
    at.advance();
  }
  template <class Tile>
  __device__ __forceinline__ static void load(Tile& to, const CUtensorMap& map, std::int32_t row, std::int32_t h,
                                              std::int32_t b, Barrier& full) {
    full.arrive_and_expect(Tile::kBytes);
#pragma unroll
    for (int c = 0; c < kD; c += 64) copy_box_4d(to.data + c * Tile::kRows, map, c, row, h, b, full);
  }
  __device__ __forceinline__ static void copy_box_4d(void* to, const CUtensorMap& map, int c, int row, int h, int b,
                                                     Barrier& full) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(shared_address(to)),
        "l"(&map), "r"(c), "r"(row), "r"(h), "r"(b), "r"(shared_address(&full.state))
        : "memory");
  }

  // --- Consumers -----------------------------------------------------------------------------------------------------

  /// Steps form one stream over all tasks: the first scores of a task are made beside the last O += P V of the one
  /// before.
  __device__ __forceinline__ void consume(unsigned warpgroup) {
    State k_at, v_at;
    QueryState q_at;
    AccumulatorTile<kN> s;
    AccumulatorTile<kD> o;
    OperandTile<E, kN> p;
    OnlineSoftmax softmax;
    float factor[2];

    auto task = wait_task(q_at);
    if (task.first_query < 0) return;
    Issue::init(warpgroup);
    shared_.keys.wait_full(k_at);
    auto step = shared_.step[k_at.stage];
    wgmma_fence();
    mma_ABt(s, shared_.q[q_at.stage][warpgroup], shared_.k[k_at.stage]);
    wgmma_commit();
    wgmma_wait<0>();
    finish_scores(s, step, q_at, k_at);
    for (;;) {
      o.clear(), softmax.reset();
      if (step.partial) mask(s, step, first_row(task));
      softmax.raise_shift_to_max(s, args_.scale_log2, factor);
      softmax.template exponentiate<kLateFirstKey>(s, args_.scale_log2);
      p.pack(s);
      while (!step.last) {
        shared_.keys.wait_full(k_at);
        issue_scores_and_values(s, o, p, warpgroup, q_at, k_at, v_at);
        step = shared_.step[k_at.stage];
        finish_scores(s, step, q_at, k_at);
        if (step.partial) mask(s, step, first_row(task));
        softmax.template exponentiate<kLateFirstKey>(s, args_.scale_log2);
        // This branch needs the sums, so the exponentials come before it. ptxas 13 moves the wait for O += P V over
        // exponentials, but over no branch.
        const bool raised = softmax.raise_shift_by_sums(factor);
        finish_values(o, v_at);
        if (raised) rescale_rows(o, factor), rescale_rows(s, factor);
        p.pack(s);
      }
      const auto next = wait_task(q_at);
      const bool more = next.first_query >= 0;
      if (more) shared_.keys.wait_full(k_at);
      issue_scores_and_values(s, o, p, warpgroup, q_at, k_at, v_at);  // without a next task these scores are nobody's
      if (more) {
        step = shared_.step[k_at.stage];
        finish_scores(s, step, q_at, k_at);
      }
      finish_values(o, v_at);
      store(o, softmax, task);
      if (!more) break;
      task = next;
    }
    Issue::finish(warpgroup);
  }
  /// S of the next step, O += P V of this one. Returns when S is there; O is to be waited for.
  __device__ __forceinline__ void issue_scores_and_values(AccumulatorTile<kN>& s, AccumulatorTile<kD>& o,
                                                          const OperandTile<E, kN>& p, unsigned warpgroup,
                                                          QueryState q_at, State k_at, State v_at) {
    Issue::wait_turn(warpgroup);
    wgmma_fence();
    mma_ABt(s, shared_.q[q_at.stage][warpgroup], shared_.k[k_at.stage]);
    wgmma_commit();
    shared_.values.wait_full(v_at);
    wgmma_fence();
    mma_AB(o, p, shared_.v[v_at.stage]);
    wgmma_commit();
    Issue::pass_turn(warpgroup);
    wgmma_wait<1>();
  }

  /// The next task with a key to see. Those without are done here. q_at: where its Q is.
  __device__ __forceinline__ Task wait_task(QueryState& q_at) {
    for (;;) {
      shared_.queries.wait_full(q_at);
      const auto task = shared_.task[q_at.stage];
      if (task.first_query < 0 || task.steps > 0) return task;
      shared_.queries.release(q_at);
      q_at.advance();
      store_empty(task);
    }
  }
  __device__ __forceinline__ void store_empty(const Task& task) const {
    const auto rows = min(kM, args_.queries - task.first_query);
    auto* const out = static_cast<E*>(args_.out) + task.b * args_.out_batch + task.h * args_.out_head;
    const auto lse = (std::int64_t{task.b} * args_.heads + task.h) * args_.queries + task.first_query;
    for (std::int32_t i = threadIdx.x; i < rows * (kD / 8); i += 128 * kWarpgroups) {
      auto* const to = out + std::int64_t{task.first_query + i / (kD / 8)} * args_.out_row + i % (kD / 8) * 8;
      *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
      if (args_.lse && i < rows) args_.lse[lse + i] = OnlineSoftmax::kMinusInfinity;
    }
  }
  __device__ __forceinline__ void finish_scores(AccumulatorTile<kN>& s, const StepInfo& step, QueryState& q_at,
                                                State& k_at) {
    s.fence_operand();
    shared_.keys.release(k_at);
    k_at.advance();
    if (step.last) {
      shared_.queries.release(q_at);
      q_at.advance();
    }
  }
  __device__ __forceinline__ void finish_values(AccumulatorTile<kD>& o, State& v_at) {
    wgmma_wait<0>();
    o.fence_operand();
    shared_.values.release(v_at);
    v_at.advance();
  }
  /// This lane's first row of the tile; the second is 8 behind it.
  __device__ __forceinline__ static std::int32_t first_row(const Task& task) {
    return task.first_query + static_cast<std::int32_t>(threadIdx.x / 32 * 16 + lane_number() / 4);
  }

  __device__ __forceinline__ void mask(AccumulatorTile<kN>& s, const StepInfo& step, std::int32_t row) const {
    apply_mask(s, [&](int r, int cell) {
      auto end = args_.keys;
      if constexpr (Traits::kMask == MaskKind::causal) end = min(end, row + 8 * r + args_.diagonal + 1);
      return first_bits(end - step.first_key - 64 * cell);
    });
  }

  __device__ __forceinline__ void store(AccumulatorTile<kD>& o, OnlineSoftmax& softmax, const Task& task) const {
    const auto row = first_row(task);
    float factor[2], not_finite = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_total(softmax.row_sum[r]);
      factor[r] = sum == 0 ? 0.0f : __fdividef(1.0f, sum);
      if (args_.lse && lane_number() % 4 == 0 && row + 8 * r < args_.queries)
        args_.lse[(std::int64_t{task.b} * args_.heads + task.h) * args_.queries + row + 8 * r] = softmax.lse(r, sum);
    }
    rescale_rows(o, factor);
#pragma unroll
    for (int j = 0; j < kD / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) not_finite = fmaf(0, o.x[j][e], not_finite);
    if (not_finite != 0) *args_.not_finite = 1;  // NaN
    store_rows(o, row, static_cast<E*>(args_.out) + task.b * args_.out_batch + task.h * args_.out_head);
  }
  /// Neighbouring lanes swap pairs of channels: a warp then writes whole 32-byte sectors of 8 rows at a time.
  __device__ __forceinline__ void store_rows(const AccumulatorTile<kD>& o, std::int32_t row, E* out) const {
    const unsigned t = lane_number() % 4;
    const bool odd = t % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto* const to = out + std::int64_t{row + 8 * r} * args_.out_row + 8 * (t % 2) + 2 * (t & 2);
#pragma unroll
      for (int j = 0; j < kD / 8; j += 2) {
        const auto x0 = packed_pair(o.x[j][2 * r], o.x[j][2 * r + 1], E());
        const auto x1 = packed_pair(o.x[j + 1][2 * r], o.x[j + 1][2 * r + 1], E());
        const auto other = __shfl_xor_sync(0xffffffffu, odd ? x0 : x1, 1);
        if (row + 8 * r < args_.queries)
          *reinterpret_cast<uint2*>(to + 8 * j) = odd ? make_uint2(other, x1) : make_uint2(x0, other);
      }
    }
  }

  const AttentionArgs& args_;
  Shared& shared_;
};

}  // namespace anyflash::cuda
