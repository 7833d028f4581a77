// The backward pass of one key block: dK and dV are gathered in the thread's memory over all query blocks that see the
// block (of all query heads that share it), dQ is added to the heads' buffers, each query block when its turn has come.
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
      : problem_(problem), plan_(plan), schedule_(schedule), blocks_(problem, plan, rows, memory),
        group_heads_(problem.heads_q / problem.heads_kv), d_qk_(padded(problem.d_qk)), d_v_(padded(problem.d_v)) {
    memory += BlockPair<T, E>::memory_size(problem, plan);
    const auto take = [&](std::int64_t count) { return std::exchange(memory, memory + count); };
    dk_ = take(kTile * d_qk_), dv_ = take(kTile * d_v_);
  }
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan) {
    return BlockPair<T, E>::memory_size(problem, plan) + kTile * (padded(problem.d_qk) + padded(problem.d_v));
  }
  /// Elements of the query gradients of one group.
  static std::int64_t buffer_size(const Problem& problem, const ExecutionPlan& plan) {
    return problem.heads_q / problem.heads_kv * plan.query_grid.count() * kTile * padded(problem.d_qk);
  }

  /// dq: the group's buffer, (heads of the group, query blocks, 64, padded channels).
  void run(std::int64_t group, std::int32_t key_block, T* dq) {
    const auto b = group / problem_.heads_kv, g = group % problem_.heads_kv;
    group_ = group, key_block_ = key_block, dq_buffer_ = dq;
    blocks_.load_keys(b, g, key_block, with_ds());
    blocks_.look_ahead(b, g, key_block + 1);
    std::fill_n(dk_, kTile * d_qk_, T(0));
    std::fill_n(dv_, kTile * d_v_, T(0));
    for (std::int64_t head = 0; head < group_heads_; ++head) {
      const auto h = g * group_heads_ + head;
      const RunList& list = plan_.group(b, h).queries_of_key_block;
      for (auto r = list.start[key_block]; r < list.start[key_block + 1]; ++r) {
        const Run& run = list.runs[r];
        for (std::int32_t i = 0; i < run.count; ++i) add_query_block(b, h, head, run.first + i, run.kind);
      }
    }
    const auto store = [&](const T* sum, std::int64_t width, const Operand& to, std::int64_t channels) {
      if (to.given()) StoreRows(sum, width, to, problem_.type, b, g, blocks_.key_box(), problem_.k_size, channels);
    };
    store(dk_, d_qk_, problem_.dk, problem_.d_qk);
    store(dv_, d_v_, problem_.dv, problem_.d_v);
  }

 private:
  bool with_ds() const { return problem_.dq.given() || problem_.dk.given(); }

  void add_query_block(std::int64_t b, std::int64_t h, std::int64_t head, std::int32_t query_block, TileClass kind) {
    blocks_.load_queries(b, h, query_block);
    blocks_.compute(b, h, kind, with_ds(), true);
    const bool whole = kind == TileClass::full;
    if (problem_.dv.given()) {
      add_transposed(whole, blocks_.p_left, blocks_.dout_right, d_v_, dv_);
      add_not_finite(blocks_.dout_bad, blocks_.p, blocks_.dout, d_v_, dv_);
    }
    if (problem_.dk.given()) {
      add_transposed(whole, blocks_.ds_left, blocks_.q_right, d_qk_, dk_);
      add_not_finite(blocks_.q_bad, blocks_.ds, blocks_.q, d_qk_, dk_);
    }
    if (problem_.dq.given()) add_dq(whole, b, h, head, query_block);
  }

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

  void add_dq(bool whole, std::int64_t b, std::int64_t h, std::int64_t head, std::int32_t query_block) {
    T* const sum = dq_buffer_ + (head * plan_.query_grid.count() + query_block) * kTile * d_qk_;
    const Rank rank = rank_of(plan_.group(b, h).keys_of_query_block, query_block, key_block_);
    Turn& turn = schedule_.turn(group_, head, query_block);
    turn.wait_for(rank.index);
    rank.index > 0 ? multiply_dq<true>(whole, sum) : multiply_dq<false>(whole, sum);
    for (auto left = blocks_.k_bad; left; left &= left - 1) {
      const int j = std::countr_zero(left);
      for (int i = 0; i < kTile; ++i) {
        if (!(blocks_.words[i] >> j & 1)) continue;
        for (std::int64_t c = 0; c < problem_.d_qk; ++c)
          sum[i * d_qk_ + c] += InColumn(blocks_.ds, kTile, i, j) * InColumn(blocks_.k_t, kTile, c, j);
      }
    }
    if (rank.index + 1 == rank.total) {
      StoreRows(sum, d_qk_, problem_.dq, problem_.type, b, h, blocks_.query_box(), problem_.q_size, problem_.d_qk);
    }
    turn.add(1);
  }

  /// sum (64 queries, d_qk) = or += dS K.
  template <bool kAdd>
  void multiply_dq(bool whole, T* sum) {
    constexpr auto keys_deep = Depth<E>(kTile);
    const E *const ds = blocks_.ds_rows, *const k = blocks_.k_right;
    if (whole) return Gemm<kAdd>(kTile, keys_deep, d_qk_, ds, keys_deep, 1, k, d_qk_, sum, d_qk_);
    for (int i = 0; i < kTile / kSpanRows; ++i) {
      const auto [begin, keys] = blocks_.spans[i];
      const auto first = i * kSpanRows;
      Gemm<kAdd>(kSpanRows, Depth<E>(keys), d_qk_, ds + first * keys_deep + Depth<E>(begin), keys_deep, 1,
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
  std::int32_t key_block_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_BACKWARD_TASK_INL_H_
