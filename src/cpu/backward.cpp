// The backward pass on the CPU (FlashAttention-2, Dao 2023, algorithm 2): dQ, dK, dV, dBias and dSink, as asked for,
// exact and bitwise repeatable.
//
//   1. once for each query row: delta = dO . O, with dlse and lse (backward_rows-inl.h), the remainder of a large lse
//      (backward_rest-inl.h), and its share of dSink
//   2. for each key block: five products per tile, in one pass (backward_task-inl.h), ordered by backward_schedule.h
//   3. for each tile of the bias, if its gradient is wanted (backward_bias-inl.h)
//
// Memory, all linear in the sequence: a few numbers per query row; a query gradient in the compute type for each head
// in flight; some tiles per thread. Bound by the products: 10 * d flops per pair, against 4 * d in the forward pass.

#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward.cpp"
#include "hwy/foreach_target.h"

#include "cpu/amx.h"
#include "cpu/backend.h"
#include "cpu/backward_schedule.h"
#include "cpu/backward_shared.h"
#include "cpu/numbers.h"
#include "cpu/progress.h"
#include "cpu/tuning.h"
#include "cpu/walk.h"
#include "rules/coordinates.h"
#include "rules/words.h"

#include "hwy/highway.h"

#include "cpu/exp-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/ahead-inl.h"
#include "cpu/threads-inl.h"
#include "cpu/pairs-inl.h"
#include "cpu/scores-inl.h"
#include "cpu/backward_rows-inl.h"
#include "cpu/backward_tile-inl.h"
#include "cpu/backward_block-inl.h"
#include "cpu/backward_rest-inl.h"
#include "cpu/backward_task-inl.h"
#include "cpu/backward_bias-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

/// The number of threads that a call is worth: waking one takes about as long as a tile.
inline int useful_threads(const Problem& problem, const ExecutionPlan& plan) {
  if (problem.batch * problem.heads_q == 0) return 1;
  const auto tiles = plan.tiles * (problem.batch * problem.heads_q / (plan.batch_groups * plan.head_groups));
  const std::int64_t most = threads_of(problem, plan);
  return static_cast<int>(std::clamp<std::int64_t>(tiles / tuning::kTilesOfThread, 1, most));
}

template <class T>
void ZeroUnseenRows(const Problem& problem, const ExecutionPlan& plan, std::int64_t b, std::int64_t h,
                    std::int32_t block, T* memory) {
  const auto& start = plan.group(b, h).keys_of_query_block.start;
  if (start[block] != start[block + 1]) return;
  const auto width = padded(problem.d_qk);
  std::fill_n(memory, kTile * width, T(0));
  StoreRows(memory, width, problem.dq, problem.type, b, h, plan.query_grid.box(block), problem.q_size, problem.d_qk);
}

/// The backward pass in steps. Without a workspace it only finds the bytes that it needs.
///
/// Ordinarily there is one step, or one for each so many groups. In chunks of queries and keys it goes group by group:
/// for a range of keys, for each head and range of queries, dK and dV, and dQ too if there is one range of keys. With
/// several ranges of keys dQ is made by a second pass, whose scores are computed again: seven products for five. The
/// sums are added in the same order in each case, so the bits are the same.
template <class T, class E>
class BackwardRun {
 public:
  BackwardRun(const Problem& problem, const ExecutionPlan& plan, char* workspace)
      : problem_(problem),
        plan_(plan),
        workspace_(workspace),
        query_blocks_(plan.query_grid.count()),
        key_blocks_(plan.key_grid.count()),
        groups_(problem.batch * problem.heads_kv),
        heads_(problem.heads_kv ? problem.heads_q / problem.heads_kv : 1),
        useful_threads_(useful_threads(problem, plan)) {}

  std::int64_t run() {
    Parts parts(workspace_);
    sink_sums_ = parts.take<double>(problem_.dsink.given() ? problem_.heads_q : 0);
    if (sink_sums_) std::fill_n(sink_sums_, problem_.dsink.given() ? problem_.heads_q : 0, 0.0);
    problem_.chunks.q > 0 || problem_.chunks.kv > 0 ? walk_chunks(parts) : walk_groups(parts);
    if (problem_.dbias.given() && problem_.chunks.any()) find_bias_gradient(parts);
    for (std::int64_t h = 0; workspace_ && problem_.dsink.given() && h < problem_.heads_q; ++h)
      WriteNumber(problem_.dsink.data, problem_.dsink.type, h * problem_.dsink.head, sink_sums_[h]);
    return bytes_;
  }

 private:
  static bool products(const Problem& problem) {
    return problem.dq.given() || problem.dk.given() || problem.dv.given();
  }

  /// What a step does beside its products.
  struct Also {
    bool in_chunks = false, terms = true, sink = true;
    T *dq = nullptr, *sums = nullptr;  ///< memory that lasts over several steps
  };

  void walk_groups(const Parts& parts) {
    const auto at_once = problem_.chunks.groups > 0 ? std::min(problem_.chunks.groups, groups_) : groups_;
    const BlockRange queries{0, static_cast<std::int32_t>(query_blocks_)};
    const BlockRange keys{0, static_cast<std::int32_t>(key_blocks_)};
    if (groups_ == 0) return step(problem_, {0, 0, 0, heads_, queries, keys}, {}, parts);
    progress_.emplace(problem_, (groups_ + at_once - 1) / at_once), blocks_untold_ = at_once * key_blocks_;
    for (std::int64_t first = 0; first < groups_; first += at_once) {
      const auto groups = std::min(at_once, groups_ - first);
      if (!workspace_ && first > 0 && groups == at_once) continue;  // as large as the first
      step(problem_, {first, groups, 0, heads_, queries, keys}, {}, parts);
      if (workspace_) progress_->done_one();
    }
  }

  void walk_chunks(Parts& parts) {
    const auto chunks_q = chunks_of(problem_.chunks.q, query_blocks_);
    const auto chunks_kv = chunks_of(problem_.chunks.kv, key_blocks_);
    const bool of_keys = problem_.dk.given() || problem_.dv.given();
    const bool second = chunks_kv > 1 && problem_.dq.given();
    Problem keys_only = problem_, queries_only = problem_;
    if (second) keys_only.dq = {}, queries_only.dk = queries_only.dv = {};
    const auto most = [](std::int64_t blocks, std::int64_t chunks) { return (blocks + chunks - 1) / chunks; };
    Also also{true};
    if (problem_.dq.given()) also.dq = parts.take<T>(most(query_blocks_, chunks_q) * kTile * padded(problem_.d_qk));
    if (of_keys) also.sums = parts.take<T>(most(key_blocks_, chunks_kv) * KeyBlockTask<T, E>::sums_size(problem_));
    const bool first_pass = of_keys || !second;
    const auto of_queries = heads_ * chunks_q;  // chunks of queries, of all heads
    progress_.emplace(problem_, groups_ * of_queries * chunks_kv * (int(first_pass) + int(second)));
    blocks_untold_ = most(key_blocks_, chunks_kv);
    const auto range_of = [&](std::int64_t group, std::int64_t of_query, std::int64_t key) {
      return BackwardRange{group,
                           1,
                           of_query / chunks_q,
                           1,
                           chunk_of(query_blocks_, chunks_q, of_query % chunks_q),
                           chunk_of(key_blocks_, chunks_kv, key)};
    };
    if (!workspace_) {  // the last chunks are the largest
      const auto largest = range_of(groups_ - 1, of_queries - 1, chunks_kv - 1);
      if (first_pass) step(keys_only, largest, also, parts);
      if (second) step(queries_only, largest, also, parts);
      return;
    }
    for (std::int64_t group = 0; group < groups_; ++group) {
      for (std::int64_t key = 0; first_pass && key < chunks_kv; ++key) {
        also.terms = true, also.sink = key == 0;
        const bool all = keys_only.dq.given() || (problem_.dsink.given() && key == 0);  // terms of all rows are used
        walk_visited(
            of_queries, all, [&](std::int64_t i) { return range_of(group, i, key); },
            [&](BackwardRange range, bool first, bool last) {
              range.first = first, range.last = last;
              step(keys_only, range, also, parts);
            });
      }
      for (std::int64_t of_query = 0; second && of_query < of_queries; ++of_query)
        walk_visited(
            chunks_kv, false, [&](std::int64_t i) { return range_of(group, of_query, i); },
            [&](const BackwardRange& range, bool first, bool) {
              also.terms = first, also.sink = first && !first_pass;
              step(queries_only, range, also, parts);
            });
    }
  }

  bool visits(const BackwardRange& range) const {
    const auto b = range.first_group / problem_.heads_kv, g = range.first_group % problem_.heads_kv;
    return meet(plan_.group(b, g * heads_ + range.first_head).keys_of_query_block, range.queries, range.keys);
  }

  /// Calls run(range, first, last) for those of `count` ranges whose queries visit their keys, for the first if none
  /// does; or for all.
  template <class RangeOf, class Run>
  void walk_visited(std::int64_t count, bool all, const RangeOf& range_of, const Run& run) {
    std::int64_t first = 0, last = count - 1;
    while (!all && first < last && !visits(range_of(first))) ++first;
    while (!all && first < last && !visits(range_of(last))) --last;
    if (!all && first == last && !visits(range_of(last))) first = last = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const bool walked = all || i == first || i == last || (i > first && i < last && visits(range_of(i)));
      if (walked) run(range_of(i), i == first, i == last);
      progress_->done_one(walked);
    }
  }

  /// Called for each block of keys that is read outside a step's range. Where the caller listens this is one thread.
  void read_block() {
    if (!progress_ || !progress_->listened() || ++blocks_read_ < blocks_untold_) return;
    progress_->tell();
    blocks_read_ = 0;
  }

  /// parts: what is already taken; a step lays out its memory behind that.
  void step(const Problem& problem, const BackwardRange& range, const Also& also, Parts parts) {
    const auto blocks = range.queries.count(), keys = range.keys.count(), heads = range.groups * range.heads;
    const bool any_products = products(problem) && range.groups * keys > 0;
    const bool with_bias = problem.dbias.given() && !problem.chunks.any();
    const auto bias_tiles = with_bias ? BiasTask<T, E>::count(problem, plan_) : 0;
    const auto most_tasks = std::max({heads * blocks, range.groups * keys, bias_tiles, std::int64_t{1}});
    const auto threads = static_cast<int>(std::min<std::int64_t>(useful_threads_, most_tasks));
    RowTerms<T> terms(problem, plan_, range, parts);
    BackwardSchedule schedule(any_products ? range.groups : 0, range.heads, blocks, std::max<std::int64_t>(keys, 1),
                              KeyBlockTask<T, E>::together(), threads, parts);
    auto thread_memory = KeyBlockTask<T, E>::memory_size(problem, plan_, schedule.together());
    if (with_bias) thread_memory = std::max(thread_memory, BiasTask<T, E>::memory_size(problem, plan_));
    T* const memory = parts.take<T>(thread_memory * threads);
    const bool own_dq = any_products && problem.dq.given() && !also.in_chunks;
    const auto buffer_size = own_dq ? KeyBlockTask<T, E>::buffer_size(problem, range) : 0;
    T* const buffers = own_dq ? parts.take<T>(buffer_size * schedule.slots()) : also.dq;
    bytes_ = std::max(bytes_, parts.bytes());
    if (!workspace_) return;

    if (also.terms) find_terms(problem, range, terms, threads, memory, thread_memory);
    if (problem.dsink.given() && also.sink) add_sink_terms(range, terms);
    if (any_products) {
      OnThreads(schedule.threads(), [&](int thread) {
        const amx::Alone tiles;
        KeyBlockTask<T, E> task(problem, plan_, range, terms, schedule, &memory[thread * thread_memory]);
        for (BackwardSchedule::Task next; schedule.next(thread, next);) {
          task.run(next.group, next.first_key_block, next.key_blocks, &buffers[next.slot * buffer_size], also.sums);
          schedule.finish(next);
        }
      });
    }
    if (with_bias) {
      ForEach(bias_tiles, threads, [&](std::int64_t tile, int thread) {
        BiasTask<T, E>(problem, plan_, terms, &memory[thread * thread_memory]).run(tile);
      });
    }
  }

  void find_terms(const Problem& problem, const BackwardRange& range, RowTerms<T>& terms, int threads, T* memory,
                  std::int64_t thread_memory) {
    const auto blocks = range.queries.count(), count = range.groups * range.heads * blocks;
    const bool listened = progress_ && progress_->listened();
    const auto rests = [&](std::int64_t b, std::int64_t h, std::int32_t block, T* own) {
      FindRests<E>(problem, plan_, b, h, block, own, terms, [&] { read_block(); });
      if (problem.dsink.given()) FindSinkTerm(problem, b, h, block, terms);
    };
    const auto with_block = [&](std::int64_t i, const auto& work) {
      const bool whole = blocks == query_blocks_;
      const auto block =
          whole ? walked(plan_.query_grid, i % blocks) : static_cast<std::int32_t>(range.queries.first + i % blocks);
      const auto head = terms.first_head + i / blocks;
      work(head / problem.heads_q, head % problem.heads_q, block);
    };
    ForEach(count, threads, [&](std::int64_t i, int thread) {
      with_block(i, [&](std::int64_t b, std::int64_t h, std::int32_t block) {
        T* const own = &memory[thread * thread_memory];
        FindRowTerms<E>(problem, plan_, b, h, block, own, terms);
        if (!listened) rests(b, h, block, own);
        if (problem.dq.given()) ZeroUnseenRows(problem, plan_, b, h, block, own);
      });
    });
    for (std::int64_t i = 0; listened && i < count; ++i)
      with_block(i, [&](std::int64_t b, std::int64_t h, std::int32_t block) { rests(b, h, block, memory); });
  }

  /// Steps come in an order that adds a head's shares batch entry by batch entry, block by block.
  void add_sink_terms(const BackwardRange& range, const RowTerms<T>& terms) {
    const auto blocks = range.queries.count();
    for (std::int64_t i = 0; i < range.groups * range.heads * blocks; ++i)
      sink_sums_[(terms.first_head + i / blocks) % problem_.heads_q] += terms.sink[i];
  }

  /// The gradient of the bias, with the row terms of one block at a time.
  void find_bias_gradient(Parts parts) {
    const auto tiles = BiasTask<T, E>::count(problem_, plan_);
    const auto most_threads = problem_.after_chunk ? 1 : useful_threads_;
    const auto threads = static_cast<int>(std::min<std::int64_t>(most_threads, std::max<std::int64_t>(tiles, 1)));
    const auto thread_memory = BiasTask<T, E>::memory_size(problem_, plan_);
    T* const memory = parts.take<T>(thread_memory * threads);
    std::vector<RowTerms<T>> terms;
    for (int i = 0; i < threads; ++i)
      terms.emplace_back(problem_, plan_, BackwardRange{0, 1, 0, 1, {0, 1}, {0, 1}}, parts);
    bytes_ = std::max(bytes_, parts.bytes());
    if (!workspace_) return;
    ForEach(tiles, threads, [&](std::int64_t tile, int thread) {
      BiasTask<T, E>(problem_, plan_, terms[thread], &memory[thread * thread_memory], &terms[thread]).run(tile);
      read_block();
    });
  }

  const Problem& problem_;
  const ExecutionPlan& plan_;
  char* const workspace_;
  const std::int64_t query_blocks_, key_blocks_, groups_, heads_;
  const int useful_threads_;
  double* sink_sums_ = nullptr;
  std::int64_t bytes_ = 0;
  std::int64_t blocks_read_ = 0, blocks_untold_ = 1;  // since the caller was told; after how many it is
  std::optional<Progress> progress_;                  // none without groups
};

template <class T, class E>
std::int64_t RunBackward(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  return BackwardRun<T, E>(problem, plan, workspace).run();
}

std::int64_t Backward(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  return WithElements(problem, [&]<class T, class E>() { return RunBackward<T, E>(problem, plan, workspace); });
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anyflash::cpu {

HWY_EXPORT(Backward);

std::int64_t backward_workspace(const Problem& problem, const ExecutionPlan& plan) {
  choose_instruction_set();
  return HWY_DYNAMIC_DISPATCH(Backward)(problem, plan, nullptr);
}

void backward(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  choose_instruction_set();
  HWY_DYNAMIC_DISPATCH(Backward)(problem, plan, workspace);
}

}  // namespace anyflash::cpu
#endif
