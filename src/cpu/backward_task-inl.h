// The backward pass of a few key blocks: dK and dV are gathered in the thread's memory over all query blocks that see
// one of them (of all query heads that share them), dQ is added to the heads' buffers, each query block when its turn
// has come.
//
//   for each query block:  S = Q K^T, P, dP = dO V^T, dS;  dV += P^T dO;  dK += dS^T Q;  dQ += dS K
//
// FlashAttention-2 (Dao 2023), algorithm 2, with an order for the additions to dQ in place of atomics.

#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_BACKWARD_TASK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_BACKWARD_TASK_INL_H_
#undef ANYFLASH_CPU_BACKWARD_TASK_INL_H_
#else
#define ANYFLASH_CPU_BACKWARD_TASK_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

using tuning::kSpanKeys;

template <class T, class E>
class KeyBlockTask {
 public:
  KeyBlockTask(const Problem& problem, const ExecutionPlan& plan, const RowTerms<T>& rows, BackwardSchedule& schedule,
               T* memory)
      : problem_(problem), plan_(plan), schedule_(schedule),
        blocks_(problem, plan, rows, memory, schedule.together()), group_heads_(problem.heads_q / problem.heads_kv),
        d_qk_(padded(problem.d_qk)), d_v_(padded(problem.d_v)) {
    const auto together = schedule.together();
    memory += BlockPair<T, E>::memory_size(problem, plan, together);
    const auto take = [&](std::int64_t count) { return std::exchange(memory, memory + count); };
    dk_ = take(together * kTile * d_qk_), dv_ = take(together * kTile * d_v_);
  }
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan, std::int64_t together) {
    return BlockPair<T, E>::memory_size(problem, plan, together) +
           together * kTile * (padded(problem.d_qk) + padded(problem.d_v));
  }
  /// Elements of the query gradients of one group.
  static std::int64_t buffer_size(const Problem& problem, const ExecutionPlan& plan) {
    return problem.heads_q / problem.heads_kv * plan.query_grid.count() * kTile * padded(problem.d_qk);
  }
  /// Key blocks that are best taken at once.
  static constexpr std::int64_t together() { return kLeftRow == 1 ? 1 : tuning::kKeyBlocksOfTiles; }

  /// dq: the group's buffer, (heads of the group, query blocks, 64, padded channels). count: at most `together`.
  void run(std::int64_t group, std::int32_t first_key_block, std::int32_t count, T* dq) {
    const auto b = group / problem_.heads_kv, g = group % problem_.heads_kv;
    group_ = group, first_key_block_ = first_key_block, count_ = count, dq_buffer_ = dq;
    for (std::int32_t slot = 0; slot < count; ++slot)
      blocks_.load_keys(b, g, first_key_block + slot, with_ds(), slot);
    blocks_.look_ahead(b, g, first_key_block + count);
    std::fill_n(dk_, count * kTile * d_qk_, T(0));
    std::fill_n(dv_, count * kTile * d_v_, T(0));
    for (std::int64_t head = 0; head < group_heads_; ++head) add_head(b, g * group_heads_ + head, head);
    for (std::int32_t slot = 0; slot < count; ++slot) {
      blocks_.use_keys(first_key_block + slot, slot);
      const auto store = [&](const T* sums, std::int64_t width, const Operand& to, std::int64_t channels) {
        if (!to.given()) return;
        const T* const sum = sums + slot * kTile * width;
        StoreRows(sum, width, to, problem_.type, b, g, blocks_.key_box(), problem_.k_size, channels);
      };
      store(dk_, d_qk_, problem_.dk, problem_.d_qk);
      store(dv_, d_v_, problem_.dv, problem_.d_v);
    }
  }

 private:
  bool with_ds() const { return problem_.dq.given() || problem_.dk.given(); }

  /// A walk over the query blocks that a key block meets.
  struct Walk {
    const Run *run, *end;
    std::int32_t i = 0;

    bool done() const { return run == end; }
    std::int32_t block() const { return run->first + i; }
    void advance() {
      if (++i == run->count) ++run, i = 0;
    }
  };

  void add_head(std::int64_t b, std::int64_t h, std::int64_t head) {
    const RunList& list = plan_.group(b, h).queries_of_key_block;
    Walk walks[tuning::kKeyBlocksOfTiles];
    for (std::int32_t slot = 0; slot < count_; ++slot) {
      const auto* const start = &list.start[first_key_block_ + slot];
      walks[slot] = {list.runs.data() + start[0], list.runs.data() + start[1]};
    }
    constexpr auto none = std::numeric_limits<std::int32_t>::max();
    for (;;) {
      auto next = none;
      for (std::int32_t slot = 0; slot < count_; ++slot)
        if (!walks[slot].done()) next = std::min(next, walks[slot].block());
      if (next == none) return;
      add_query_block(b, h, head, next, walks);
    }
  }

  /// The tiles of a query block and those of the key blocks that see it.
  void add_query_block(std::int64_t b, std::int64_t h, std::int64_t head, std::int32_t query_block, Walk* walks) {
    blocks_.load_queries(b, h, query_block);
    QuerySum sum(*this, b, h, head, query_block);
    for (std::int32_t slot = 0; slot < count_; ++slot) {
      if (walks[slot].done() || walks[slot].block() != query_block) continue;
      const auto kind = walks[slot].run->kind;
      walks[slot].advance();
      blocks_.use_keys(first_key_block_ + slot, slot);
      blocks_.compute(b, h, kind, with_ds(), true);
      const bool whole = kind == TileClass::full;
      if (problem_.dv.given()) {
        T* const dv = dv_ + slot * kTile * d_v_;
        add_transposed(whole, blocks_.p_left, blocks_.dout_right, d_v_, dv);
        add_not_finite(blocks_.dout_bad, blocks_.p, blocks_.dout, d_v_, dv);
      }
      if (problem_.dk.given()) {
        T* const dk = dk_ + slot * kTile * d_qk_;
        add_transposed(whole, blocks_.ds_left, blocks_.q_right, d_qk_, dk);
        add_not_finite(blocks_.q_bad, blocks_.ds, blocks_.q, d_qk_, dk);
      }
      if (problem_.dq.given()) sum.add(whole);
    }
    if (problem_.dq.given()) sum.finish();
  }

  /// dQ of a query block: what this task adds to it, when its turn has come. Whole tiles beside each other are one
  /// product.
  class QuerySum {
   public:
    QuerySum(KeyBlockTask& task, std::int64_t b, std::int64_t h, std::int64_t head, std::int32_t query_block)
        : task_(task), b_(b), h_(h), query_block_(query_block),
          turn_(task.schedule_.turn(task.group_, head, query_block)),
          sum_(task.dq_buffer_ + (head * task.plan_.query_grid.count() + query_block) * kTile * task.d_qk_) {}

    /// dS K of the tile just computed.
    void add(bool whole) {
      const auto& blocks = task_.blocks_;
      if (!started_) start(blocks.key_block());
      ++tiles_;
      if (whole && !blocks.k_bad) {
        if (waiting_ > 0 && blocks.ds_rows != ds_ + waiting_ * Depth<E>(kTile)) add_waiting();
        if (waiting_++ == 0) ds_ = blocks.ds_rows, k_ = blocks.k_right;
        if (task_.count_ == 1) add_waiting();
        return;
      }
      add_waiting();
      any_ ? task_.template multiply_dq<true>(whole, sum_) : task_.template multiply_dq<false>(whole, sum_);
      any_ = true;
      task_.add_keys_not_finite(sum_);
    }

    void finish() {
      if (!started_) return;
      add_waiting();
      if (rank_.index + tiles_ == rank_.total) {
        const auto& problem = task_.problem_;
        StoreRows(sum_, task_.d_qk_, problem.dq, problem.type, b_, h_, task_.blocks_.query_box(), problem.q_size,
                  problem.d_qk);
      }
      turn_.add(tiles_);
    }

   private:
    void start(std::int32_t key_block) {
      rank_ = rank_of(task_.plan_.group(b_, h_).keys_of_query_block, query_block_, key_block);
      started_ = true, any_ = rank_.index > 0;
    }
    void add_waiting() {
      if (!waited_) turn_.wait_for(rank_.index);
      waited_ = true;
      if (waiting_ == 0) return;
      const auto depth = waiting_ * Depth<E>(kTile), width = task_.d_qk_, line = task_.blocks_.ds_line;
      any_ ? Gemm<true>(kTile, depth, width, ds_, line, 1, k_, width, sum_, width)
           : Gemm<false>(kTile, depth, width, ds_, line, 1, k_, width, sum_, width);
      any_ = true, waiting_ = 0;
    }

    KeyBlockTask& task_;
    const std::int64_t b_, h_;
    const std::int32_t query_block_;
    Turn& turn_;
    T* const sum_;
    Rank rank_;
    const E *ds_ = nullptr, *k_ = nullptr;  ///< of the tiles that wait
    std::int32_t tiles_ = 0, waiting_ = 0;
    bool started_ = false, waited_ = false, any_ = false;
  };

  /// sum (64 keys, width) += weights^T rows; both are operands of the tile.
  void add_transposed(bool whole, const E* weights, const E* rows, std::int64_t width, T* sum) {
    if (whole) {
      Gemm<true>(kTile, Depth<E>(kTile), width, weights, kLeftRow, kLeftStep, rows, width, sum, width);
    } else {
      for (int key = 0; key < kTile; key += kSpanKeys) {
        const auto [first, count] = rows_that_see(key);
        Gemm<true>(kSpanKeys, Depth<E>(count), width, weights + Depth<E>(first) * kLeftStep + key * kLeftRow,
                   kLeftRow, kLeftStep, rows + Depth<E>(first) * width, width, sum + key * width, width);
      }
    }
  }

  /// The same of the rows `bad` that hold a NaN or an infinity, over the visible pairs alone: they reach only the keys
  /// that their query sees.
  void add_not_finite(std::uint64_t bad, const E* weights, const E* rows, std::int64_t width, T* sum) {
    for (auto left = bad; left; left &= left - 1) {
      const int i = std::countr_zero(left);
      for (auto seen = blocks_.words[i]; seen; seen &= seen - 1) {
        const int j = std::countr_zero(seen);
        for (std::int64_t c = 0; c < width; ++c)
          sum[j * width + c] += InColumn(weights, kTile, i, j) * InRow(rows + i * Depth<E>(width), c);
      }
    }
  }

  /// The rows from the first to the last that see one of keys key .. key + kSpanKeys - 1, whole groups of kSpanRows.
  std::pair<int, int> rows_that_see(int key) const {
    constexpr int groups = kTile / kSpanRows;
    const auto sees = [&](int i) { return (blocks_.seen[i] >> key & ((1u << kSpanKeys) - 1)) != 0; };
    int first = 0, end = groups;
    while (first < end && !sees(first)) ++first;
    while (end > first && !sees(end - 1)) --end;
    return {first * kSpanRows, (end - first) * kSpanRows};
  }

  /// To sum (64 queries, d_qk), what keys that hold a NaN or an infinity add.
  void add_keys_not_finite(T* sum) {
    for (auto left = blocks_.k_bad; left; left &= left - 1) {
      const int j = std::countr_zero(left);
      for (int i = 0; i < kTile; ++i) {
        if (!(blocks_.words[i] >> j & 1)) continue;
        for (std::int64_t c = 0; c < problem_.d_qk; ++c)
          sum[i * d_qk_ + c] += InColumn(blocks_.ds, kTile, i, j) * InColumn(blocks_.k_t, kTile, c, j);
      }
    }
  }

  /// sum (64 queries, d_qk) = or += dS K.
  template <bool kAdd>
  void multiply_dq(bool whole, T* sum) {
    const auto line = blocks_.ds_line;
    const E *const ds = blocks_.ds_rows, *const k = blocks_.k_right;
    if (whole) return Gemm<kAdd>(kTile, Depth<E>(kTile), d_qk_, ds, line, 1, k, d_qk_, sum, d_qk_);
    for (int i = 0; i < kTile / kSpanRows; ++i) {
      const auto [begin, keys] = blocks_.spans[i];
      const auto first = i * kSpanRows;
      Gemm<kAdd>(kSpanRows, Depth<E>(keys), d_qk_, ds + first * line + Depth<E>(begin), line, 1,
                 k + Depth<E>(begin) * d_qk_, d_qk_, sum + first * d_qk_, d_qk_);
    }
  }

  static constexpr auto kLeftRow = BlockPair<T, E>::kLeftRow, kLeftStep = BlockPair<T, E>::kLeftStep;

  const Problem& problem_;
  const ExecutionPlan& plan_;
  BackwardSchedule& schedule_;
  BlockPair<T, E> blocks_;
  const std::int64_t group_heads_, d_qk_, d_v_;
  T *dk_, *dv_;
  T* dq_buffer_ = nullptr;
  std::int64_t group_ = 0;
  std::int32_t first_key_block_ = 0, count_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_BACKWARD_TASK_INL_H_
