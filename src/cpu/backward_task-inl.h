// The backward pass of a few key blocks. dK and dV are accumulated in the thread's memory over all query blocks that
// see one of them, for all query heads that share them. dQ is added to the heads' buffers, for each query block when it
// is this task's turn.
//
//   for each query block:  S = Q K^T, P, dP = dO V^T, dS;  dV += P^T dO;  dK += dS^T Q;  dQ += dS K
//
// FlashAttention-2 (Dao 2023), algorithm 2, with ordered additions to dQ instead of atomics.

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

template <class T, class E>
class KeyBlockTask {
 public:
  KeyBlockTask(const Problem& problem, const ExecutionPlan& plan, const BackwardRange& range, const RowTerms<T>& rows,
               BackwardSchedule& schedule, T* memory)
      : problem_(problem),
        plan_(plan),
        range_(range),
        schedule_(schedule),
        blocks_(problem, plan, rows, memory, schedule.together()),
        group_heads_(problem.heads_q / problem.heads_kv),
        d_qk_(padded(problem.d_qk)),
        d_v_(padded(problem.d_v)) {
    const auto together = schedule.together();
    memory += LoadedBlocks<T, E>::memory_size(problem, plan, together);
    const auto take = [&](std::int64_t count) { return std::exchange(memory, memory + count); };
    dk_ = take(together * kTile * d_qk_), dv_ = take(together * kTile * d_v_);
  }
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan, std::int64_t together) {
    return LoadedBlocks<T, E>::memory_size(problem, plan, together) +
           together * kTile * (padded(problem.d_qk) + padded(problem.d_v));
  }
  /// Elements of the query gradients of one group.
  static std::int64_t buffer_size(const Problem& problem, const BackwardRange& range) {
    return range.heads * range.queries.count() * kTile * padded(problem.d_qk);
  }
  /// Elements of the sums of dK and dV of one key block.
  static std::int64_t sums_size(const Problem& problem) { return kTile * (padded(problem.d_qk) + padded(problem.d_v)); }
  /// How many key blocks are best taken at once.
  static constexpr std::int64_t together() { return kInTiles<E> ? tuning::kKeyBlocksOfTiles : 1; }

  /// group, first_key_block: counted from the range's first. dq: the group's buffer, (heads of the range, query blocks,
  /// 64, padded channels). count: at most `together`. sums: where dK and dV of the key blocks are accumulated over
  /// several steps, or null.
  void run(std::int64_t group, std::int32_t first_key_block, std::int32_t count, T* dq, T* sums) {
    const auto of_call = range_.first_group + group;
    const auto b = of_call / problem_.heads_kv, g = of_call % problem_.heads_kv;
    if (sums) dk_ = sums + first_key_block * sums_size(problem_), dv_ = dk_ + count * kTile * d_qk_;
    first_key_block += range_.keys.first;
    group_ = group, first_key_block_ = first_key_block, count_ = count, dq_buffer_ = dq;
    for (std::int32_t slot = 0; slot < count; ++slot) blocks_.load_keys(b, g, first_key_block + slot, with_ds(), slot);
    blocks_.look_ahead(b, g, first_key_block + count);
    for (std::int32_t slot = 0; slot < count; ++slot) {
      blocks_.use_keys(first_key_block + slot, slot);
      if (!range_.first) break;
      const auto rows = kInTiles<E> ? kTile : blocks_.key_rows;  // in tiles the keys are columns
      std::fill_n(dk_ + slot * kTile * d_qk_, rows * d_qk_, T(0));
      std::fill_n(dv_ + slot * kTile * d_v_, rows * d_v_, T(0));
    }
    for (std::int64_t head = 0; head < range_.heads; ++head)
      add_head(b, g * group_heads_ + range_.first_head + head, head);
    for (std::int32_t slot = 0; range_.last && slot < count; ++slot) {
      blocks_.use_keys(first_key_block + slot, slot);
      const auto store = [&](const T* sums, std::int64_t width, const Operand& to, std::int64_t channels) {
        if (!to.given()) return;
        const T* sum = sums + slot * kTile * width;
        if constexpr (kInTiles<E>) TransposeRows(width, sum, kTile, blocks_.scratch()), sum = blocks_.scratch();
        StoreRows(sum, width, to, problem_.type, b, g, blocks_.key_box(), problem_.k_size, channels);
      };
      store(dk_, d_qk_, problem_.dk, problem_.d_qk);
      store(dv_, d_v_, problem_.dv, problem_.d_v);
    }
  }

 private:
  static constexpr auto kQueryBlocks = LoadedBlocks<T, E>::kQueryBlocks;
  /// The number of keys of a partial tile in one product that sums over queries.
  static constexpr int kKeys = kInTiles<E> ? tuning::kSpanStep : tuning::kSpanKeys;

  bool with_ds() const { return problem_.dq.given() || problem_.dk.given(); }

  /// A walk over the query blocks of a range that a key block visits.
  struct Walk {
    const Run *run = nullptr, *end = nullptr;
    std::int32_t i = 0, end_block = 0;

    Walk() = default;
    Walk(const Run* from, const Run* to, const BlockRange& range) : run(from), end(to), end_block(range.end) {
      while (run != end && run->first + run->count <= range.first) ++run;
      if (run != end) i = std::max(range.first - run->first, 0);
    }
    bool done() const { return run == end || block() >= end_block; }
    std::int32_t block() const { return run->first + i; }
    bool meets(std::int32_t next) const { return !done() && block() == next; }
    void advance() {
      if (++i == run->count) ++run, i = 0;
    }
  };

  void add_head(std::int64_t b, std::int64_t h, std::int64_t head) {
    const RunList& list = plan_.group(b, h).queries_of_key_block;
    Walk walks[tuning::kKeyBlocksOfTiles];
    for (std::int32_t slot = 0; slot < count_; ++slot) {
      const auto* const start = &list.start[first_key_block_ + slot];
      walks[slot] = Walk(list.runs.data() + start[0], list.runs.data() + start[1], range_.queries);
    }
    constexpr auto none = std::numeric_limits<std::int32_t>::max();
    for (;;) {
      auto next = none;
      for (std::int32_t slot = 0; slot < count_; ++slot)
        if (!walks[slot].done()) next = std::min(next, walks[slot].block());
      if (next == none) return;
      add_query_blocks(b, h, head, next, walks);
    }
  }

  /// Adds the tiles of query blocks `first` .. first + kQueryBlocks - 1 and the key blocks that see them.
  void add_query_blocks(std::int64_t b, std::int64_t h, std::int64_t head, std::int32_t first, Walk* walks) {
    QuerySum sums[] = {{*this, b, h, head}, {*this, b, h, head}};
    static_assert(kQueryBlocks <= std::size(sums));
    for (std::int32_t slot = 0; slot < count_; ++slot) {
      Walk& walk = walks[slot];
      PutOff put_off;
      for (std::int32_t at = 0; at < kQueryBlocks; ++at) {
        if (!walk.meets(first + at)) continue;
        const auto kind = walk.run->kind;
        walk.advance();
        blocks_.load_queries(b, h, first + at, at);
        blocks_.use_keys(first_key_block_ + slot, slot);
        blocks_.compute(b, h, kind, with_ds(), true);
        const bool whole = kind == TileClass::full;
        if (kInTiles<E> && whole && !blocks_.q_bad && !blocks_.dout_bad) {
          put_off.take(blocks_);
          if (at + 1 == kQueryBlocks || !walk.meets(first + at + 1)) add_put_off(slot, put_off);
        } else {
          add_put_off(slot, put_off);
          add_tile(slot, whole);
        }
        if (problem_.dq.given()) sums[at].add(first + at, whole);
      }
    }
    for (std::int32_t at = 0; at < kQueryBlocks; ++at) sums[at].finish();
  }

  /// Adds the shares of dV and dK of the tile just computed.
  void add_tile(std::int32_t slot, bool whole) {
    if (problem_.dv.given()) {
      T* const dv = dv_ + slot * kTile * d_v_;
      add_transposed(whole, blocks_.p, blocks_.dout_right, d_v_, dv);
      add_not_finite(blocks_.dout_bad, blocks_.p, blocks_.dout, d_v_, dv);
    }
    if (problem_.dk.given()) {
      T* const dk = dk_ + slot * kTile * d_qk_;
      add_transposed(whole, blocks_.ds, blocks_.q_right, d_qk_, dk);
      add_not_finite(blocks_.q_bad, blocks_.ds, blocks_.q, d_qk_, dk);
    }
  }

  /// Operands of shares of dV and dK that are deferred to become one product: full tiles of a key block with up to
  /// kQueryBlocks query blocks.
  struct PutOff {
    amx::Factors dv[kQueryBlocks], dk[kQueryBlocks];
    std::size_t count = 0;

    void take(const LoadedBlocks<T, E>& blocks) {
      const auto words = [](const E* pairs) { return reinterpret_cast<const std::uint32_t*>(pairs); };
      dv[count] = {words(blocks.dout_right), words(blocks.p)};
      dk[count++] = {words(blocks.q_right), words(blocks.ds)};
    }
  };

  void add_put_off(std::int32_t slot, PutOff& put_off) {
    if (!kInTiles<E> || put_off.count == 0) return;
    const auto add = [&](const amx::Factors* factors, std::int64_t width, T* sums) {
      if constexpr (kInTiles<E>)
        amx::multiply(true, width, kTile / 2, kTile, {factors, put_off.count}, kTile / 2, kTile,
                      sums + slot * kTile * width, kTile);
    };
    if (problem_.dv.given()) add(put_off.dv, d_v_, dv_);
    if (problem_.dk.given()) add(put_off.dk, d_qk_, dk_);
    put_off.count = 0;
  }

  /// This task's share of dQ of a query block, added when it is its turn. Full tiles next to each other become one
  /// product.
  class QuerySum {
   public:
    QuerySum(KeyBlockTask& task, std::int64_t b, std::int64_t h, std::int64_t head)
        : task_(task), b_(b), h_(h), head_(head) {}

    /// Adds dS K of the tile just computed.
    void add(std::int32_t query_block, bool whole) {
      const auto& blocks = task_.blocks_;
      if (!turn_) start(query_block, blocks.key_block());
      ++tiles_;
      if (whole && !blocks.k_bad) {
        if (put_off_ > 0 && blocks.ds_rows != ds_ + put_off_ * Depth<E>(kTile)) add_put_off();
        if (put_off_++ == 0) ds_ = blocks.ds_rows, k_ = blocks.k_right;
        if (task_.count_ == 1) add_put_off();
        return;
      }
      add_put_off();
      any_ ? task_.template multiply_dq<true>(whole, sum_) : task_.template multiply_dq<false>(whole, sum_);
      any_ = true;
      task_.add_keys_not_finite(sum_);
    }

    void finish() {
      if (!turn_) return;
      add_put_off();
      if (rank_.index + tiles_ == rank_.total) {
        const auto& problem = task_.problem_;
        const Box box = task_.plan_.query_grid.box(query_block_);
        StoreRows(sum_, task_.d_qk_, problem.dq, problem.type, b_, h_, box, problem.q_size, problem.d_qk);
      }
      turn_->add(tiles_);
    }

   private:
    void start(std::int32_t query_block, std::int32_t key_block) {
      query_block_ = query_block;
      const auto& range = task_.range_;
      const auto in_range = query_block - range.queries.first;
      turn_ = &task_.schedule_.turn(task_.group_, head_, in_range);
      sum_ = task_.dq_buffer_ + (head_ * range.queries.count() + in_range) * kTile * task_.d_qk_;
      rank_ = rank_of(task_.plan_.group(b_, h_).keys_of_query_block, query_block, key_block, range.keys.first);
      any_ = rank_.index > 0;
    }
    /// Adds the deferred tiles, once it is this task's turn.
    void add_put_off() {
      if (!waited_) turn_->wait_for(rank_.index - rank_.before);
      waited_ = true;
      if (put_off_ == 0) return;
      const auto depth = put_off_ * Depth<E>(kTile), width = task_.d_qk_, line = task_.blocks_.ds_line;
      any_ ? Gemm<true>(kTile, depth, width, ds_, line, 1, k_, width, sum_, width)
           : Gemm<false>(kTile, depth, width, ds_, line, 1, k_, width, sum_, width);
      any_ = true, put_off_ = 0;
    }

    KeyBlockTask& task_;
    const std::int64_t b_, h_, head_;
    std::int32_t query_block_ = 0;
    Turn* turn_ = nullptr;  ///< null before the first tile
    T* sum_ = nullptr;
    Rank rank_;
    const E *ds_ = nullptr, *k_ = nullptr;  ///< of the deferred tiles
    std::int32_t tiles_ = 0, put_off_ = 0;
    bool waited_ = false, any_ = false;
  };

  /// sum (64 keys, width) += weights^T rows; both are operands of the tile. In AMX tiles all three are transposed.
  void add_transposed(bool whole, const E* weights, const E* rows, std::int64_t width, T* sum) {
    const auto of_keys = [&](int key, int keys, int first, int count) {
      const auto depth = Depth<E>(count);
      const E* const left = weights + Depth<E>(first) * kTile + key;
      if constexpr (kInTiles<E>) {
        Gemm<true>(width, depth, keys, rows + Depth<E>(first), kTile / 2, 1, left, kTile, sum + key, kTile);
      } else {
        Gemm<true>(keys, depth, width, left, 1, kTile, rows + Depth<E>(first) * width, width, sum + key * width, width);
      }
    };
    if (whole) return of_keys(0, kTile, 0, kTile);
    for (int key = 0; key < kTile; key += kKeys) {
      const auto [first, count] = rows_that_see(key);
      if (count > 0) of_keys(key, kKeys, first, count);
    }
  }

  /// The same for the rows `bad` that hold a NaN or an infinity, over the visible pairs only: they reach only keys that
  /// their query sees.
  void add_not_finite(std::uint64_t bad, const E* weights, const E* rows, std::int64_t width, T* sum) {
    for (auto left = bad; left; left &= left - 1) {
      const int i = std::countr_zero(left);
      for (auto seen = blocks_.words[i]; seen; seen &= seen - 1) {
        const int j = std::countr_zero(seen);
        for (std::int64_t c = 0; c < width; ++c)
          sum[kInTiles<E> ? c * kTile + j : j * width + c] +=
              InColumn(weights, kTile, i, j) * InRow(rows + i * Depth<E>(width), c);
      }
    }
  }

  /// The rows from the first to the last that see one of keys key .. key + kKeys - 1, rounded to groups of kSpanRows.
  std::pair<int, int> rows_that_see(int key) const {
    constexpr int groups = kTile / kSpanRows;
    const auto sees = [&](int i) { return (blocks_.seen[i] >> key & ((1u << kKeys) - 1)) != 0; };
    int first = 0, end = groups;
    while (first < end && !sees(first)) ++first;
    while (end > first && !sees(end - 1)) --end;
    return {first * kSpanRows, (end - first) * kSpanRows};
  }

  /// Adds to sum (64 queries, d_qk) the share of keys that hold a NaN or an infinity.
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
      if (keys == 0 && (kAdd || first >= blocks_.query_rows)) continue;
      Gemm<kAdd>(kSpanRows, Depth<E>(keys), d_qk_, ds + first * line + Depth<E>(begin), line, 1,
                 k + Depth<E>(begin) * d_qk_, d_qk_, sum + first * d_qk_, d_qk_);
    }
  }

  const Problem& problem_;
  const ExecutionPlan& plan_;
  const BackwardRange& range_;
  BackwardSchedule& schedule_;
  LoadedBlocks<T, E> blocks_;
  const std::int64_t group_heads_, d_qk_, d_v_;
  T *dk_, *dv_;  // (64 keys, channels) for each key block; in tiles (channels, 64 keys)
  T* dq_buffer_ = nullptr;
  std::int64_t group_ = 0;
  std::int32_t first_key_block_ = 0, count_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_BACKWARD_TASK_INL_H_
