// The forward pass on the CPU (FlashAttention-2, Dao 2023, algorithm 1).
//
// A task is a block of queries of one head. It walks the plan's runs of key blocks, 64 keys each:
//   S = Q K^T, then score_mod (scores-inl.h); mask words hide pairs; P by the online softmax (softmax-inl.h);
//   out += P V.
// A thread's own memory holds, in the compute type, Q (rows, d_qk), S (rows, 64), out (rows, d_v) and the key blocks
// that it packed last (panels-inl.h), which neighbouring query blocks share. Bound by the two products (gemm-inl.h).
// Values near the type's largest number can overflow in out, which is divided last. Such a task walks again, with P
// scaled to sum to a half. Decode calls use few_rows-inl.h instead. A task's arithmetic does not depend on
// threads or on the rest of the batch, so results are always the same bits.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cpp"
#include "hwy/foreach_target.h"

#include "cpu/backend.h"
#include "cpu/numbers.h"
#include "cpu/progress.h"
#include "cpu/shares.h"
#include "cpu/spans.h"
#include "cpu/tile_words.h"
#include "cpu/tuning.h"
#include "cpu/walk.h"
#include "cpu/workspace.h"
#include "rules/coordinates.h"
#include "rules/words.h"

#include "hwy/highway.h"

#include "cpu/exp-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/pairs-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/softmax-inl.h"
#include "cpu/finish-inl.h"
#include "cpu/panels-inl.h"
#include "cpu/ahead-inl.h"
#include "cpu/threads-inl.h"
#include "cpu/few_products-inl.h"
#include "cpu/few_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

using tuning::kSpanRows;

/// T: the computation's type. E: the type of the products' operands, T or Pair.
template <class T, class E>
class ForwardTask {
 public:
  ForwardTask(const Problem& problem, const ExecutionPlan& plan, T* memory)
      : problem_(problem),
        plan_(plan),
        d_qk_(padded(problem.d_qk)),
        d_v_(padded(problem.d_v)),
        rows_(static_cast<std::int32_t>(rules::volume(plan.query_grid.extent))),
        plain_(PlainScores(problem)),
        panels_(problem, plan, memory) {
    memory += Panels<T, E>::memory_size(problem, plan);
    const auto take = [&](std::int64_t count) { return std::exchange(memory, memory + count); };
    q_ = take(rows_ * d_qk_), s_ = take(rows_ * kTile);
    v_clean_ = reinterpret_cast<E*>(take(kPRow * d_v_));
    p_ = reinterpret_cast<E*>(kIsPair<E> ? take(rows_ * kPRow) : s_);
    use_state(memory);
  }
  /// Numbers of the state of a query block from key block to key block.
  static std::int64_t state_size(const Problem& problem, const ExecutionPlan& plan) {
    return rules::volume(plan.query_grid.extent) * (padded(problem.d_v) + 2 * kSumLanes + 4);
  }
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan) {
    const auto rows = rules::volume(plan.query_grid.extent), d_qk = padded(problem.d_qk), d_v = padded(problem.d_v);
    return Panels<T, E>::memory_size(problem, plan) + rows * (d_qk + kTile + (kIsPair<E> ? kPRow : 0)) + kPRow * d_v +
           state_size(problem, plan);
  }

  /// A part of a query block's walk: over one chunk of the keys. The state is cleared at the first, and the results are
  /// stored after the last. again: of the second walk.
  struct Part {
    BlockRange keys;
    bool first = true, last = true, again = false;
  };

  /// Keeps the state of the query blocks that follow in `memory`, so that a walk can be continued later.
  void use_state(T* memory) {
    const auto take = [&](std::int64_t count) { return std::exchange(memory, memory + count); };
    out_ = take(rows_ * d_v_);
    T *row_max = take(rows_ * kSumLanes), *row_sum = take(rows_ * kSumLanes);
    ends_ = reinterpret_cast<RowEnd<T>*>(take(rows_ * 2));
    state_ = {take(rows_), row_max, row_sum, out_, d_v_, ScaleLeft<T>(problem_)};
    factor_ = take(rows_);
  }

  /// next: the query block of this head that is likely to follow, or -1. False after the last part if a second walk is
  /// needed.
  bool run(std::int64_t b, std::int64_t h, std::int32_t block, std::int32_t next, const Part& part) {
    b_ = b, h_ = h, g_ = h / (problem_.heads_q / problem_.heads_kv);
    block_ = block, query_box_ = plan_.query_grid.box(block);
    look_ahead(next);
    load_queries();
    state_.factor = part.again ? factor_ : nullptr;
    if (part.first) part.again ? state_.clear(used_rows_, ends_) : state_.clear(used_rows_);
    walk(part.keys);
    return !part.last || finish(part.again) || part.again;
  }

 private:
  HWY_NOINLINE void walk(const BlockRange& keys) {
    const auto& group = plan_.group(b_, h_);
    const auto& list = group.keys_of_query_block;
    for (auto i = list.start[block_]; i < list.start[block_ + 1]; ++i) {
      const Run& run = list.runs[i];
      const auto end = std::min(run.first + run.count, keys.end);
      for (std::int32_t key_block = std::max(run.first, keys.first); key_block < end; ++key_block)
        visit(group.program, key_block, run.kind);
    }
  }

  /// Prefetches the next task's data: its queries, and the outermost of its keys; the others are mostly in the cache.
  void look_ahead(std::int32_t next) {
    ahead_.clear();
    if (next < 0) return;
    const auto& group = plan_.group(b_, h_);
    const auto& [start, runs] = group.keys_of_query_block;
    if (start[next] == start[next + 1]) return;
    const Run& last_run = runs[start[next + 1] - 1];
    const std::int32_t first = runs[start[next]].first, last = last_run.first + last_run.count - 1;
    for (const auto block : {first, last}) {
      if (panels_.holds(b_, g_, block)) continue;
      const RowAddresses k(problem_.k, b_, g_, plan_.key_grid.box(block), group.program.k_size(), &problem_.pages);
      const RowAddresses v(problem_.v, b_, g_, plan_.key_grid.box(block), group.program.k_size(), &problem_.pages);
      ahead_.add(problem_.k, problem_.type, k, problem_.d_qk);
      ahead_.add(problem_.v, problem_.type, v, problem_.d_v);
    }
    const RowAddresses q(problem_.q, b_, h_, plan_.query_grid.box(next), problem_.q_size);
    ahead_.add(problem_.q, problem_.type, q, problem_.d_qk);
  }

  /// Rows after the last one that exists are left out of all that follows.
  void load_queries() {
    LoadRows(problem_.q, problem_.type, b_, h_, query_box_, problem_.q_size, problem_.d_qk, q_, d_qk_);
    used_rows_ = rows_;
    while (used_rows_ > 0 && !rules::inside(query_box_.entry(used_rows_ - 1), problem_.q_size)) --used_rows_;
    if constexpr (kIsPair<E>) PairNeighbours(q_, rows_ * d_qk_, reinterpret_cast<Pair*>(q_));
  }

  void visit(const rules::Program& program, std::int32_t block, TileClass kind) {
    const Panel<T, E>& keys = panels_.of(b_, g_, block, program.k_size());
    if (kind != TileClass::full) return visit_partial(program, keys);
    find_products(0, used_rows_, 0, kTile, keys);
    if (!plain_) FinishScores<T>(problem_, program, b_, h_, query_box_, used_rows_, keys.box, s_, nullptr);
    for (std::int32_t row = 0; row < used_rows_; ++row) {
      SoftmaxRow<false, kTile>(0, s_ + row * kTile, p_ + row * kPRow, row, state_);
      ahead_.fetch(1);
    }
    add_values(0, used_rows_, 0, kTile, keys.v);
  }

  /// Computes a partial tile a few rows at a time, each time only on the span of keys (multiples of kSpanStep) that
  /// they see. If all rows have the same span, as at the end of the keys, it computes all at once.
  void visit_partial(const rules::Program& program, const Panel<T, E>& keys) {
    words_ = tile_words_.of(program, query_box_, used_rows_, keys.box);
    if (!plain_) {
      find_products(0, used_rows_, 0, keys.keys, keys);
      FinishScores<T>(problem_, program, b_, h_, query_box_, used_rows_, keys.box, s_, nullptr);
    }
    const E* const v = keys.not_finite ? without_not_finite(keys) : keys.v;
    const auto step = one_span() ? used_rows_ : kSpanRows;
    for (std::int32_t first = 0; first < used_rows_; first += step) {
      const auto rows = std::min(step, used_rows_ - first);
      const auto [begin, width] = span_of(seen_by(words_ + first, rows));
      if (width == 0) continue;
      if (plain_) find_products(first, rows, begin, width, keys);
      softmax(first, rows, begin, width);
      add_values(first, rows, begin, width, v);
    }
    if (keys.not_finite) add_not_finite(keys);
  }
  /// Whether all rows see the same keys.
  bool one_span() const {
    return std::all_of(words_, words_ + used_rows_, [&](std::uint64_t word) { return word == words_[0]; });
  }

  /// s = Q K^T for some rows and keys.
  void find_products(std::int32_t first, std::int32_t rows, int begin, int width, const Panel<T, E>& keys) {
    const auto* const q = reinterpret_cast<const E*>(q_);
    const auto q_row = Depth<E>(d_qk_);
    Gemm<false>(rows, Depth<E>(problem_.d_qk), width, q + first * q_row, q_row, 1, keys.k_t + begin, kTile,
                s_ + first * kTile + begin, kTile);
  }
  /// out += P V for them.
  void add_values(std::int32_t first, std::int32_t rows, int begin, int width, const E* v) {
    Gemm<true>(rows, Depth<E>(width), d_v_, p_ + first * kPRow + Depth<E>(begin), kPRow, 1, v + Depth<E>(begin) * d_v_,
               d_v_, out_ + first * d_v_, d_v_);
  }

  const E* without_not_finite(const Panel<T, E>& keys) {
    if constexpr (kIsPair<E>) {
      CleanPairs(keys.v, d_v_, keys.not_finite, v_clean_);
    } else {
      CleanRows(keys.v, d_v_, v_clean_, keys.keys);
    }
    return v_clean_;
  }

  void softmax(std::int32_t first, std::int32_t rows, int begin, int width) {
    const auto each_row = [&]<int kWidth>() {
      for (std::int32_t row = first; row < first + rows; ++row) {
        SoftmaxRow<true, kWidth>(words_[row] >> begin, s_ + row * kTile + begin, p_ + row * kPRow + Depth<E>(begin),
                                 row, state_);
        ahead_.fetch(1);
      }
    };
    WithWidth(width, each_row);
  }

  /// Adds values that are not finite to the queries that see them, and to no others.
  void add_not_finite(const Panel<T, E>& keys) {
    for (std::int32_t row = 0; row < used_rows_; ++row)
      AddRowsNotFinite(words_[row] & keys.not_finite, p_ + row * kPRow, keys.v, d_v_, problem_.d_v, out_ + row * d_v_);
  }

  /// Stores the results. False if a second walk is needed.
  HWY_NOINLINE bool finish(bool again) {
    const RowAddresses address(problem_.out, b_, h_, query_box_, problem_.q_size);
    bool good = true;
    for (std::int32_t row = 0; row < used_rows_; ++row) {
      if (again) {
        if (address.exists(row)) KeepStored(problem_, address[row], out_ + row * d_v_);
        continue;
      }
      RowEnd<T>& end = ends_[row] = SettleRow(row, state_);
      if (!address.exists(row)) continue;
      good &= FinishRow(problem_, plan_, b_, h_, block_, row, end, out_ + row * d_v_);
      StoreStatistics(problem_, plan_, b_, h_, block_, row, end);
    }
    StoreRows(out_, d_v_, problem_.out, problem_.type, address, used_rows_, problem_.d_v);
    return good;
  }

  static constexpr std::int64_t kPRow = Depth<E>(kTile);

  const Problem& problem_;
  const ExecutionPlan& plan_;
  const std::int64_t d_qk_, d_v_;
  const std::int32_t rows_;
  const bool plain_;
  Panels<T, E> panels_;
  T *q_, *s_, *out_;  // q_ holds E once loaded
  E *v_clean_, *p_;
  RowState<T> state_;
  RowEnd<T>* ends_;
  T* factor_;
  TileWords<kMaxQueryRows> tile_words_;
  const std::uint64_t* words_ = nullptr;  // of the current tile
  Ahead ahead_;
  std::int64_t b_ = 0, h_ = 0, g_ = 0;
  Box query_box_{};
  std::int32_t block_ = 0, used_rows_ = 0;
};

/// The number of threads that a call is worth: waking one takes some microseconds, in which a thread does some 10^5
/// multiplications.
int threads_for(const Problem& problem, const ExecutionPlan& plan, std::int64_t tasks) {
  const double products = double(problem.batch) * double(problem.heads_q) * double(problem.queries()) *
                          double(problem.keys()) * double(problem.d_qk + problem.d_v);
  const auto most = std::min<double>(threads_of(problem, plan), std::max(products / tuning::kProductsOfThread, 1.0));
  return static_cast<int>(std::min<std::int64_t>(static_cast<std::int64_t>(most), tasks));
}

/// The forward pass over chunks: some groups at a time, of these a range of query blocks, and for these one range of key
/// blocks after the other. With one range of keys a task's state is in its thread's memory, else in the workspace.
template <class T, class E>
class ForwardRun {
 public:
  ForwardRun(const Problem& problem, const ExecutionPlan& plan, char* workspace)
      : problem_(problem),
        plan_(plan),
        heads_of_group_(problem.heads_kv ? problem.heads_q / problem.heads_kv : 1),
        groups_(problem.batch * problem.heads_kv),
        at_once_(problem.chunks.groups > 0 ? std::min(problem.chunks.groups, groups_) : groups_),
        chunks_q_(chunks_of(problem.chunks.q, plan.query_grid.count())),
        chunks_kv_(chunks_of(problem.chunks.kv, plan.key_grid.count())),
        workspace_(workspace) {
    const auto most_blocks = (plan.query_grid.count() + chunks_q_ - 1) / chunks_q_;
    const auto tasks = at_once_ * heads_of_group_ * most_blocks;
    threads_ = threads_for(problem, plan, tasks);
    const auto size = (ForwardTask<T, E>::memory_size(problem, plan) + 15) / 16 * 16;
    Parts parts(workspace);
    T* const memory = parts.take<T>(threads_ * size);
    workers_ = parts.take<ForwardTask<T, E>>(threads_);
    static_assert(std::is_trivially_destructible_v<ForwardTask<T, E>>);
    if (chunks_kv_ > 1) {
      states_ = parts.take<T>(tasks * ForwardTask<T, E>::state_size(problem, plan));
      overflowed_ = parts.take<std::uint8_t>(tasks);
    }
    own_bytes_ = parts.bytes();
    const Shares shares(at_once_, heads_of_group_ * most_blocks, threads_, parts);
    bytes_ = parts.bytes();
    for (int i = 0; workspace && i < threads_; ++i) std::construct_at(workers_ + i, problem, plan, memory + i * size);
  }

  std::int64_t bytes() const { return bytes_; }

  void run() {
    Progress progress(problem_, (groups_ + at_once_ - 1) / at_once_ * chunks_q_ * chunks_kv_);
    for (std::int64_t first = 0; first < groups_; first += at_once_)
      for (std::int64_t i = 0; i < chunks_q_; ++i) {
        const Range range{first, std::min(at_once_, groups_ - first), chunk_of(plan_.query_grid.count(), chunks_q_, i)};
        if (walk_keys(range, false, progress)) walk_keys(range, true, progress);
      }
  }

 private:
  /// The tasks of a chunk of queries.
  struct Range {
    std::int64_t first_group, groups;
    BlockRange queries;
  };

  BlockRange keys_of(std::int64_t chunk) const { return chunk_of(plan_.key_grid.count(), chunks_kv_, chunk); }

  /// Whether any task of a range visits a chunk of keys.
  bool visits(const Range& range, std::int64_t chunk) const {
    const bool one_mask = plan_.batch_groups * plan_.head_groups == 1;
    const auto heads = one_mask ? 1 : range.groups * heads_of_group_;
    for (auto head = range.first_group * heads_of_group_, end = head + heads; head < end; ++head) {
      const auto& group = plan_.group(head / problem_.heads_q, head % problem_.heads_q);
      if (meet(group.keys_of_query_block, range.queries, keys_of(chunk))) return true;
    }
    return false;
  }

  /// Walks the chunks of keys that are visited, or the first if none is; true if any task needs a second walk.
  bool walk_keys(const Range& range, bool again, Progress& progress) {
    bool any = false;
    std::int64_t first = 0, last = chunks_kv_ - 1;
    while (first < last && !visits(range, first)) ++first;
    while (first < last && !visits(range, last)) --last;
    if (first == last && !visits(range, last)) first = last = 0;
    for (std::int64_t i = 0; i < chunks_kv_; ++i) {
      const bool walked = i == first || i == last || (i > first && i < last && visits(range, i));
      if (walked) any |= run_tasks(range, {keys_of(i), i == first, i == last, again});
      if (!again) progress.done_one(walked);
    }
    return any;
  }

  /// The queries of a key/value head visit the same keys, so a thread takes them one after the other. Later query blocks
  /// come first: under causal rules they take longest. If there are many, a thread takes a few at a time.
  bool run_tasks(const Range& range, const typename ForwardTask<T, E>::Part& part) {
    const auto blocks = range.queries.count(), tasks = range.groups * heads_of_group_ * blocks;
    Parts parts(workspace_ + own_bytes_);
    Shares shares(range.groups, heads_of_group_ * blocks, threads_, parts);
    const auto at_a_time = std::clamp<std::int64_t>(tasks / (threads_ * 32), 1, tuning::kMostBlocksAtOnce);
    const auto block_at = [&](std::int64_t i) {
      return chunks_q_ > 1 ? static_cast<std::int32_t>(range.queries.first + i) : walked(plan_.query_grid, i);
    };
    std::atomic<bool> any{false};
    OnThreads(threads_, [&](int thread) {
      for (Shares::Share share; shares.next(thread, at_a_time, share);) {
        for (auto i = share.first; i < share.first + share.count; ++i) {
          const auto task = share.group * heads_of_group_ * blocks + i;
          if (part.again && chunks_kv_ > 1 && !overflowed_[task]) continue;
          const auto head = (range.first_group + share.group) * heads_of_group_ + i / blocks,
                     left = blocks - 1 - i % blocks;
          if (!run_task(thread, head, task, block_at(left), left > 0 ? block_at(left - 1) : -1, part)) any = true;
        }
      }
    });
    return any;
  }

  bool run_task(int thread, std::int64_t head, std::int64_t task, std::int32_t block, std::int32_t next,
                typename ForwardTask<T, E>::Part part) {
    const auto b = head / problem_.heads_q, h = head % problem_.heads_q;
    auto& worker = workers_[thread];
    if (chunks_kv_ == 1) {
      if (!worker.run(b, h, block, next, part)) part.again = true, worker.run(b, h, block, next, part);
      return true;
    }
    worker.use_state(states_ + task * ForwardTask<T, E>::state_size(problem_, plan_));
    const bool good = worker.run(b, h, block, next, part);
    if (part.last) overflowed_[task] = !good;
    return good;
  }

  const Problem& problem_;
  const ExecutionPlan& plan_;
  const std::int64_t heads_of_group_, groups_, at_once_, chunks_q_, chunks_kv_;
  char* const workspace_;
  int threads_ = 1;
  ForwardTask<T, E>* workers_ = nullptr;
  T* states_ = nullptr;
  std::uint8_t* overflowed_ = nullptr;
  std::int64_t own_bytes_ = 0, bytes_ = 0;
};

template <class T, class E>
std::int64_t RunForward(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  ForwardRun<T, E> run(problem, plan, workspace);
  if (workspace) run.run();
  return run.bytes();
}

/// Decoding with little memory: a thread computes the parts of a group one after the other and joins each at once. The
/// bits are those of RunFewRows, whose parts are joined in the same order.
template <class T, class E>
std::int64_t RunFewRowsInOrder(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  const auto groups = problem.batch * problem.heads_kv, width = padded(problem.d_v);
  const FewRows shape(problem, plan, FewRows::one_head);
  FewRows two = shape, one = shape;
  two.parts = 2, one.parts = 1;
  const auto threads = problem.after_chunk ? 1 : threads_for(problem, plan, groups);
  const auto size = (FewRowsTask<T, E>::memory_size(problem, plan) + 15) / 16 * 16;
  Parts parts(workspace);
  T* const memory = parts.take<T>(threads * size);
  T* const outs = parts.take<T>(threads * 2 * shape.rows * width);
  auto* const all_ends = parts.take<RowEnd<T>>(threads * 3 * shape.rows);
  if (!workspace) return parts.bytes();
  const auto chunks = chunks_of(problem.chunks.kv, shape.parts);
  Progress progress(problem, groups * chunks);
  ForEach(groups, threads, [&](std::int64_t group, int thread) {
    const auto b = group / problem.heads_kv, g = group % problem.heads_kv;
    auto* const ends = all_ends + thread * 3 * shape.rows;
    const Part<T> first{outs + thread * 2 * shape.rows * width, ends};
    const Part<T> next{first.out + shape.rows * width, ends + shape.rows};
    auto* const joined = ends + 2 * shape.rows;
    const auto walk = [&](const RowEnd<T>* before) {
      for (std::int64_t part = 0; part < shape.parts; ++part) {
        FewRowsTask<T, E> task(problem, plan, shape, memory + thread * size);
        task.run(b, g, part, part == 0 ? first : next, before);
        for (std::int64_t row = 0; part > 0 && row < shape.rows; ++row)
          first.ends[row] = JoinRow(two, row, width, first);
        if (!before && (part + 1) * chunks / shape.parts > part * chunks / shape.parts) progress.done_one();
      }
      return JoinParts(problem, plan, one, b, g, first, joined, before != nullptr);
    };
    if (!walk(nullptr)) walk(joined);
  });
  return parts.bytes();
}

template <class T, class E>
std::int64_t RunFewRows(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  const auto groups = problem.batch * problem.heads_kv, width = padded(problem.d_v);
  const auto parts_of_heads = groups * FewRows(problem, plan, 0).parts;
  const auto threads = threads_for(problem, plan, parts_of_heads);
  const FewRows shape(problem, plan, threads);
  const auto rows = shape.heads * shape.rows, bunches = groups / shape.heads, tasks = bunches * shape.parts;
  const auto size = (FewRowsTask<T, E>::memory_size(problem, plan) + 15) / 16 * 16;
  Parts parts(workspace);
  T* const memory = parts.take<T>(threads * size);
  T* const out = parts.take<T>(tasks * rows * width);
  auto* const ends = parts.take<RowEnd<T>>(tasks * rows);
  auto* const joined = parts.take<RowEnd<T>>(groups * shape.rows);
  if (!workspace) return parts.bytes();
  const auto part_of = [&](std::int64_t task, std::int64_t head) {
    const auto row = task * rows + head * shape.rows;
    return Part<T>{out + row * width, ends + row};
  };
  const auto run = [&](std::int64_t i, int thread, const RowEnd<T>* before) {
    const auto group = i / shape.parts * shape.heads;
    FewRowsTask<T, E> task(problem, plan, shape, memory + thread * size);
    task.run(group / problem.heads_kv, group % problem.heads_kv, i % shape.parts, part_of(i, 0), before);
  };
  ForEach(tasks, threads, [&](std::int64_t i, int thread) { run(i, thread, nullptr); });
  ForEach(bunches, threads, [&](std::int64_t bunch, int thread) {
    const auto first = bunch * shape.parts;
    RowEnd<T>* const ends_of_bunch = joined + bunch * rows;
    const auto join = [&](std::int64_t head, bool again) {
      const auto group = bunch * shape.heads + head;
      return JoinParts(problem, plan, shape, group / problem.heads_kv, group % problem.heads_kv, part_of(first, head),
                       ends_of_bunch + head * shape.rows, again);
    };
    std::uint64_t overflowed = 0;  // heads
    for (std::int64_t head = 0; head < shape.heads; ++head) overflowed |= std::uint64_t{!join(head, false)} << head;
    if (!overflowed) return;
    for (auto i = first; i < first + shape.parts; ++i) run(i, thread, ends_of_bunch);
    for (; overflowed; overflowed &= overflowed - 1) join(std::countr_zero(overflowed), true);
  });
  return parts.bytes();
}

template <class T, class E>
std::int64_t RunForwardOf(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  if (!FewRows::suit(problem, plan)) return RunForward<T, E>(problem, plan, workspace);
  return problem.chunks.any() ? RunFewRowsInOrder<T, E>(problem, plan, workspace)
                              : RunFewRows<T, E>(problem, plan, workspace);
}

std::int64_t Forward(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  return WithElements(problem, [&]<class T, class E>() { return RunForwardOf<T, E>(problem, plan, workspace); });
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anyflash::cpu {

HWY_EXPORT(Forward);

std::int64_t forward_workspace(const Problem& problem, const ExecutionPlan& plan) {
  choose_instruction_set();
  return HWY_DYNAMIC_DISPATCH(Forward)(problem, plan, nullptr);
}

void forward(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  choose_instruction_set();
  HWY_DYNAMIC_DISPATCH(Forward)(problem, plan, workspace);
}

}  // namespace anyflash::cpu
#endif
