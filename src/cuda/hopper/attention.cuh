// The forward pass on Hopper (sm_90a), bfloat16 and float16 (FlashAttention-3, Shah et al. 2024).
//
// A task is a query tile of a head, 64 rows for each consumer warpgroup, against all key steps that the tile visits.
// Thread blocks are persistent and take tasks, longest first, heads whose K and V share the L2 together. One producer
// warp loads K, step by step, by TMA; another loads V; a third takes tasks, loads Q and stores O. A consumer warpgroup
// keeps S, P and O in registers and issues the next step's S = Q K^T together with this step's O += P V; its softmax runs
// while the tensor cores work for the other warpgroups, which issue one after the other. O leaves by TMA from where Q
// was, or from registers. Masks are the plan's runs and words: a step is a few key blocks that any of the tile's query
// blocks visits. For few visits a task is one query block, and a multiprocessor has some thread blocks.
// Where a sequence is one query block, the warpgroups have a head each that share a key head (PackGQA). Where there are
// few tasks, each has a part of the keys (split-KV): its O leaves from registers in float32, and decode's kernel joins the
// parts.
// A query block with a result that is not finite is noted, and the portable kernel makes it again (the non-finite
// fallback). So rows of other heads and batch entries keep their bits.
// Bound by the tensor cores, at 64 channels by the exponentials too.
#pragma once

#include "cuda/hopper/attention_producer.cuh"
#include "cuda/portable/rows.cuh"
#include "cuda/tile/accumulators.cuh"
#include "cuda/tile/lazy_softmax.cuh"
#include "cuda/tile/mask_words.cuh"
#include "cuda/tile/score_mod.cuh"

namespace anyflash::cuda {

template <class Traits>
class Attention {
 public:
  using E = typename Traits::E;
  using Shared = AttentionShared<Traits>;
  using Task = AttentionTask<Traits::kSplit>;
  static constexpr int kD = Traits::kHeadSize, kN = Traits::kKeys, kM = Traits::kQueries;
  static constexpr int kWarpgroups = Traits::kWarpgroups, kStages = Traits::kStages, kThreads = Traits::kThreads;
  using State = PipelineState<kStages>;
  using QueryState = PipelineState<Traits::kQueryStages>;
  using Issue = IssueOrder<kWarpgroups == 1 ? 0 : kWarpgroups, 1>;

  __device__ __forceinline__ Attention(const AttentionArgs& args, Shared& shared) : args_(args), shared_(shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      shared_.tasks.init(1);
      for (int w = 0; w < kWarpgroups; ++w) shared_.queries[w].init(w == 0 ? 5 : 4);  // and the warp that loads V
      shared_.keys.init(4 * kWarpgroups), shared_.values.init(4 * kWarpgroups);
      barriers_begun();
    }
    wait_for_kernel_before();
    __syncthreads();
    const unsigned warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == kWarpgroups) {
      setmaxnreg_dec<Traits::kProducerRegisters>();
      const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) - 4 * kWarpgroups;
      AttentionProducer<Traits> producer(args_, shared_);
      if (warp == 0) producer.load_all_keys();
      if (warp == 1) producer.load_all_values();
      if (warp == 2) producer.load_all_queries();
    } else {
      setmaxnreg_inc<Traits::kConsumerRegisters>();
      consume(warpgroup);
    }
  }

 private:
  // --- Consumers -----------------------------------------------------------------------------------------------------

  /// Steps form one stream over all tasks: the first S of a task is issued behind the last O += P V of the one before, and
  /// made while that O is stored.
  __device__ __forceinline__ void consume(unsigned warpgroup) {
    State k_at, v_at;
    QueryState q_at;
    AccumulatorTile<kN> s;
    AccumulatorTile<kD> o;
    OperandTile<E, kN> p;
    LazySoftmax softmax;
    float factor[2];

    Task task;
    bool more = false;  // is the first S of `task` there?
    Issue::init(warpgroup);
    for (;;) {
      if (!more) {
        task = wait_task(q_at, warpgroup);
        if (!task.exists()) break;
        shared_.keys.wait_full(k_at);
        issue_scores(s, warpgroup, q_at, k_at);
        wgmma_wait<0>();
      }
      StepInfo step = shared_.step[k_at.stage];
      finish_scores(s, task, step, warpgroup, q_at, k_at);
      softmax.reset();
      softmax.exponentiate(s, scale_log2(), args_.maxima);
      p.pack(s);
      bool first = true;  // O = P V is next, not O += P V
      for (; !step.last; first = false) {
        shared_.keys.wait_full(k_at);
        Issue::wait_turn(warpgroup);
        issue_scores(s, warpgroup, q_at, k_at);
        issue_values(o, first, p, v_at);
        Issue::pass_turn(warpgroup);
        wgmma_wait<1>();
        step = shared_.step[k_at.stage];
        finish_scores(s, task, step, warpgroup, q_at, k_at);
        softmax.exponentiate(s, scale_log2(), args_.maxima);
        // This branch needs the sums, so the exponentials come before it. ptxas 13 moves the wait for O += P V over
        // exponentials, but over no branch.
        const bool raised = softmax.raise_shift_by_sums(factor);
        wgmma_wait<0>();
        finish_values(o, v_at);
        if (raised) rescale_rows(o, factor), rescale_rows(s, factor);
        p.pack(s);
      }
      Issue::wait_turn(warpgroup);
      issue_values(o, first, p, v_at);
      Issue::pass_turn(warpgroup);
      const auto next = next_task(q_at, warpgroup);
      more = next.exists() && next.has_steps();
      if (more) shared_.keys.wait_full(k_at);
      // Without a next task too, since ptxas serializes products behind a branch. Nobody reads that S.
      issue_scores(s, warpgroup, q_at, k_at);
      const int q_stage = Traits::kBoxed ? q_at.stage ^ 1 : 0;  // where the Q of `task` was
      wgmma_wait<1>();
      finish_values(o, v_at);
      store(o, softmax, Traits::kBoxed ? shared_.task[q_stage][warpgroup] : task, q_stage);
      wgmma_wait<0>();
      task = next;
    }
    Issue::finish(warpgroup);
  }
  __device__ __forceinline__ void issue_scores(AccumulatorTile<kN>& s, unsigned warpgroup, QueryState q_at,
                                               State k_at) {
    wgmma_fence();
    mma_ABt(s, shared_.q[q_at.stage][warpgroup], shared_.k[k_at.stage]);
    wgmma_commit();
  }
  __device__ __forceinline__ void issue_values(AccumulatorTile<kD>& o, bool first, const OperandTile<E, kN>& p,
                                               State v_at) {
    shared_.values.wait_full(v_at);
    wgmma_fence();
    mma_AB(o, p, shared_.v[v_at.stage], !first);
    wgmma_commit();
  }

  __device__ __forceinline__ static unsigned cells_of(const StepInfo& step, unsigned warpgroup) {
    constexpr unsigned kBits = 2 * Traits::kCells;
    return static_cast<unsigned>(step.cells) >> kBits * warpgroup & ((1u << kBits) - 1);
  }
  __device__ __forceinline__ Task next_task(QueryState q_at, unsigned warpgroup) {
    shared_.queries[warpgroup].wait_full(q_at);
    return shared_.task[q_at.stage][warpgroup];
  }
  /// The next task with a key to see. Those without are done here. q_at: where its Q is.
  __device__ __forceinline__ Task wait_task(QueryState& q_at, unsigned warpgroup) {
    for (;;) {
      const auto task = next_task(q_at, warpgroup);
      if (!task.exists() || task.has_steps()) return task;
      shared_.queries[warpgroup].release(q_at);
      q_at.advance();
      store_empty(task);
    }
  }
  __device__ __forceinline__ void store_empty(const Task& task) const {
    for (std::int32_t i = threadIdx.x % 128; i < 64 * (kD / 8); i += 128) {
      const auto row = place_of_row(task, threadIdx.x / 128, i / (kD / 8));
      if (row.index < 0) continue;
      if (is_part()) {
        if (i % (kD / 8) == 0) store_part_statistics(task, row.index, {}, false);
        continue;
      }
      const auto channel = i % (kD / 8) * 8;
      if (channel < args_.d_v) *reinterpret_cast<uint4*>(out_of(task) + row.offset + channel) = make_uint4(0, 0, 0, 0);
      if (channel == 0) store_statistics(task, row.index, {}, LazySoftmax::kMinusInfinity);
    }
  }
  /// S is there: what is done to it, and the mask, whose words lie where K does.
  __device__ __forceinline__ void finish_scores(AccumulatorTile<kN>& s, [[maybe_unused]] const Task& task,
                                                const StepInfo& step, unsigned warpgroup, QueryState& q_at,
                                                State& k_at) {
    s.fence_operand();
    if constexpr (Traits::kGeneral) {
      apply_score_mod(s, args_.scale, args_.cap, args_.cap_inverse);
      if (args_.bias.data)
        add_bias<Traits::kBiasBytes>(s, shared_.bias[k_at.stage][warpgroup], args_.bias.type, args_.bias.query == 0,
                                     lane_row() % 64);
      if (args_.alibi.data) {
        const auto slope = read_number<float>(args_.alibi, task.b * args_.alibi.batch + task.h * args_.alibi.head);
        const auto key = 64 * shared_.key_block[k_at.stage] + 2 * static_cast<std::int32_t>(lane_number() % 4);
        apply_alibi(s, slope, static_cast<float>(task.first_query + lane_row() - key + args_.alibi_offset));
      }
    }
    if (const auto cells = cells_of(step, warpgroup)) mask(s, cells, shared_.words[k_at.stage][warpgroup]);
    shared_.keys.release(k_at);
    k_at.advance();
    if (step.last) {
      if constexpr (!Traits::kBoxed) shared_.queries[warpgroup].release(q_at);
      q_at.advance();
    }
  }
  __device__ __forceinline__ void finish_values(AccumulatorTile<kD>& o, State& v_at) {
    o.fence_operand();
    shared_.values.release(v_at);
    v_at.advance();
  }
  __device__ __forceinline__ float scale_log2() const { return Traits::kGeneral ? 1.4426950409f : args_.scale_log2; }
  /// This lane's first row of the tile; the second is 8 behind it.
  __device__ __forceinline__ static std::int32_t lane_row() {
    return static_cast<std::int32_t>(threadIdx.x / 32 * 16 + lane_number() / 4);
  }

  template <int kCells, int kRows>
  __device__ __forceinline__ static void mask(AccumulatorTile<kN>& s, unsigned cells,
                                              const std::uint64_t (&words)[kCells][kRows]) {
    apply_mask(s, [&](int r, int cell) {
      const unsigned kind = cells >> 2 * cell & 3;
      return kind == kPartialCell ? words[cell][lane_row() % 64 + 8 * r] : kind == kFullCell ? ~0ull : 0ull;
    });
  }

  // --- Results -------------------------------------------------------------------------------------------------------

  struct RowPlace {
    std::int64_t offset, index;  ///< in O, from its head's first row; in the sequence, -1 beyond it
  };
  __device__ __forceinline__ RowPlace place_of_row(const Task& task, std::int32_t block, std::int32_t row) const {
    const auto i = task.first_query + 64 * block + row;
    const auto& strides = args_.out.sequence;
    if (args_.query_cut.plain) return {i * strides[2], i < args_.queries ? i : -1};
    const auto& grid = args_.query_cut.grid;
    const auto c = entry_of({origin_of(args_.query_cut, task.first_query / 64 + block), grid.extent, grid.step}, row);
    return {c[0] * strides[0] + c[1] * strides[1] + c[2] * strides[2],
            rules::inside(c, grid.size) ? rules::flat_index(c, grid.size) : -1};
  }
  __device__ __forceinline__ E* out_of(const Task& task) const {
    return reinterpret_cast<E*>(args_.out.data) + task.b * args_.out.batch + task.h * args_.out.head;
  }
  __device__ __forceinline__ void store_statistics(const Task& task, std::int64_t row, const RowStatistics& statistics,
                                                   float lse) const {
    const auto store = [&](const Numbers& to, float x) {
      if (to.data) reinterpret_cast<float*>(to.data)[task.b * to.batch + task.h * to.head + row * to.query] = x;
    };
    store(args_.row_max, statistics.m), store(args_.row_sum, statistics.l), store(args_.lse, lse);
  }
  __device__ __forceinline__ bool is_part() const { return Traits::kSplit && args_.parts > 1; }
  /// Of a part: the largest score, not yet scaled, the sum, whether the row sees a key.
  __device__ __forceinline__ void store_part_statistics(const Task& task, std::int64_t row,
                                                        const RowStatistics& statistics, bool seen) const {
    float* const to = args_.statistics + 3 * place_in_part(task, row);
    to[0] = statistics.m, to[1] = statistics.l, to[2] = seen ? 1.0f : 0.0f;
  }
  __device__ __forceinline__ std::int64_t place_in_part(const Task& task, std::int64_t row) const {
    const auto key_head = std::int64_t{task.b} * (args_.heads / args_.group) + task.h / args_.group;
    return ((key_head * args_.parts + task.part()) * args_.group + task.h % args_.group) * args_.queries + row;
  }
  /// Does the mask let a row see any key? Only asked where no score is above -inf.
  __device__ __forceinline__ bool sees_a_key(const Task& task, std::int32_t row) const {
    const auto& list = group_of(args_, task.b, task.h).keys_of_query_block;
    const auto block = task.first_query / 64 + row / 64;
    if (block >= args_.query_cut.blocks) return false;
    for (auto i = list.start[block]; i < list.start[block + 1]; ++i) {
      const DeviceRun run = list.runs[i];
      if (run.kind == TileClass::full) return true;
      const auto* const words = run.words < 0 ? args_.words + std::int64_t{~run.words} * 64  // those of a run follow
                                              : list.words + std::int64_t{run.words} * 64;   // it is of one block
      for (std::int32_t n = 0; n < run.count; ++n)
        if (words[64 * n + row % 64]) return true;
    }
    return false;
  }

  __device__ __forceinline__ void store(AccumulatorTile<kD>& o, const LazySoftmax& softmax, const Task task,
                                        int q_stage) {
    const std::int32_t row = lane_row() + 8 * (lane_number() % 2);  // a lane finishes one, and multiplies two
    auto finished = softmax.finished(false);
    RowStatistics statistics{};
    bool seen = finished.shift != LazySoftmax::kMinusInfinity;  // a score above -inf
    const float bad = seen && !(fabsf(finished.shift) < FinishedRow::kLargestShift) ? NAN : 0;
    if (args_.has_sink_or_pair) {  // one branch, since O waits for all branches here
      if (args_.maxima) finished = softmax.finished(true);
      if (args_.row_sum.data || args_.row_max.data)
        statistics = finished.statistics(scale_log2(), Traits::kGeneral ? 1 : args_.scale, args_.maxima);
      if (args_.sink.data && (seen || sees_a_key(task, row))) {
        seen = true;
        const float sink = read_number<float>(args_.sink, task.h * args_.sink.head);
        if (!is_part()) finished.add_sink(sink), statistics.add_sink(sink);
      }
    }
    if (is_part()) statistics = finished.statistics(args_.scale_log2, 1, args_.maxima);
    const float own = finished.sum == 0 ? 0.0f : __fdividef(finished.factor, finished.sum);
    const float factor[2] = {__shfl_sync(0xffffffffu, own, lane_number() & ~1u),
                             __shfl_sync(0xffffffffu, own, lane_number() | 1u)};
    rescale_rows(o, factor);
    if (o.nan_unless_finite(bad) != 0) *args_.again = kBlocksAgain, note_block(args_, task, row / 64, 1);
    if (is_part()) store_part(o, task);
    else if constexpr (Traits::kBoxed) store_tile(o, q_stage);
    else store_rows(o, task);
    if (!is_part() && !args_.stores_lse_or_pair) return;
    // Last: the fence in store_tile() waits for all that this thread has stored.
    const auto place = place_of_row(task, row / 64, row % 64);
    if (lane_number() % 4 >= 2 || place.index < 0) return;
    if (is_part()) store_part_statistics(task, place.index, statistics, seen);
    else store_statistics(task, place.index, statistics, finished.lse());
  }
  /// O goes where this warpgroup's Q was. From there the producer stores it.
  __device__ __forceinline__ void store_tile(const AccumulatorTile<kD>& o, int q_stage) {
    const unsigned warpgroup = threadIdx.x / 128, row = threadIdx.x / 32 % 4 * 16 + lane_number() % 16;
    E* const tile = shared_.q[q_stage][warpgroup].data;
    sync_threads<128>(8 + warpgroup);  // all warps' products have read Q
#pragma unroll
    for (unsigned m = 0; m < kD / 16; ++m) {
      std::uint32_t x[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float* const pair = &o.x[2 * m + n / 2][n % 2 * 2];
        x[n] = clamped_pair(pair[0], pair[1], E());
      }
      store_matrices(tile + row * 64 + m / 4 * 4096 + ((2 * (m % 4) + lane_number() / 16) ^ row % 8) * 8, x);
    }
    fence_proxy_async();
    release(shared_.queries[warpgroup].empty[q_stage]);
  }
  __device__ __forceinline__ void store_part(const AccumulatorTile<kD>& o, const Task& task) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto row = task.first_query + lane_row() + 8 * r;
      if (row >= args_.queries) continue;
      float* const to = args_.results + place_in_part(task, row) * args_.d_v + lane_number() % 4 * 2;
#pragma unroll
      for (int j = 0; j < kD / 8; ++j)
        if (8 * j < args_.d_v) *reinterpret_cast<float2*>(to + 8 * j) = make_float2(o.x[j][2 * r], o.x[j][2 * r + 1]);
    }
  }
  /// Neighbouring lanes swap pairs of channels: a warp then writes whole 32-byte sectors of 8 rows at a time.
  __device__ __forceinline__ void store_rows(const AccumulatorTile<kD>& o, const Task& task) const {
    const auto block = lane_row() / 64, row = lane_row() % 64;
    const RowPlace rows[2] = {place_of_row(task, block, row), place_of_row(task, block, row + 8)};
    const unsigned t = lane_number() % 4;
    const bool odd = t % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto* const to = out_of(task) + rows[r].offset + 8 * (t % 2) + 2 * (t & 2);
#pragma unroll
      for (int j = 0; j < kD / 8; j += 2) {
        const auto x0 = clamped_pair(o.x[j][2 * r], o.x[j][2 * r + 1], E());
        const auto x1 = clamped_pair(o.x[j + 1][2 * r], o.x[j + 1][2 * r + 1], E());
        const auto other = __shfl_xor_sync(0xffffffffu, odd ? x0 : x1, 1);
        if (rows[r].index >= 0 && 8 * (j + odd) < args_.d_v)
          *reinterpret_cast<uint2*>(to + 8 * j) = odd ? make_uint2(other, x1) : make_uint2(x0, other);
      }
    }
  }

  const AttentionArgs& args_;
  Shared& shared_;
};

}  // namespace anyflash::cuda
