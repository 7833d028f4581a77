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
#include <type_traits>
#include <utility>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward.cpp"
#include "hwy/foreach_target.h"

#include "cpu/amx.h"
#include "cpu/backend.h"
#include "cpu/backward_schedule.h"
#include "cpu/backward_shared.h"
#include "cpu/numbers.h"
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
  std::int64_t tiles = 0;
  for (const auto& group : plan.groups)
    for (const Run& run : group.keys_of_query_block.runs) tiles += run.count;
  tiles *= problem.batch * problem.heads_q / (plan.batch_groups * plan.head_groups);
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

template <class T>
void SumSinkGradient(const Problem& problem, const RowTerms<T>& terms) {
  for (std::int64_t h = 0; h < problem.heads_q; ++h) {
    double sum = 0;
    for (std::int64_t b = 0; b < problem.batch; ++b)
      for (std::int64_t i = 0; i < terms.blocks; ++i) sum += terms.sink[terms.block(b, h, i)];
    WriteNumber(problem.dsink.data, problem.dsink.type, h * problem.dsink.head, sum);
  }
}

/// Without memory it only returns the bytes that it needs.
template <class T, class E>
std::int64_t RunBackward(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  const auto query_blocks = plan.query_grid.count(), key_blocks = plan.key_grid.count();
  const auto heads = problem.batch * problem.heads_q, groups = problem.batch * problem.heads_kv;
  const bool products = (problem.dq.given() || problem.dk.given() || problem.dv.given()) && groups * key_blocks > 0;
  const auto bias_tiles = problem.dbias.given() ? BiasTask<T, E>::count(problem, plan) : 0;
  const auto most_tasks = std::max({heads * query_blocks, groups * key_blocks, bias_tiles, std::int64_t{1}});
  const auto threads = static_cast<int>(std::min<std::int64_t>(useful_threads(problem, plan), most_tasks));

  Parts parts(workspace);
  RowTerms<T> terms(problem, plan, parts);
  const auto heads_in_group = problem.heads_kv ? problem.heads_q / problem.heads_kv : 1;
  BackwardSchedule schedule(products ? groups : 0, heads_in_group, query_blocks, std::max<std::int64_t>(key_blocks, 1),
                            KeyBlockTask<T, E>::together(), threads, parts);
  const auto together = schedule.together();
  const auto thread_memory =
      std::max(KeyBlockTask<T, E>::memory_size(problem, plan, together), BiasTask<T, E>::memory_size(problem, plan));
  T* const memory = parts.take<T>(thread_memory * threads);
  const auto buffer_size = products && problem.dq.given() ? KeyBlockTask<T, E>::buffer_size(problem, plan) : 0;
  T* const buffers = parts.take<T>(buffer_size * schedule.slots());
  if (!workspace) return parts.bytes();

  ForEach(heads * query_blocks, threads, [&](std::int64_t i, int thread) {
    const auto block = walked(plan.query_grid, i % query_blocks);
    const auto h = i / query_blocks % problem.heads_q, b = i / query_blocks / problem.heads_q;
    FindRowTerms<E>(problem, plan, b, h, block, &memory[thread * thread_memory], terms);
    FindRests<E>(problem, plan, b, h, block, &memory[thread * thread_memory], terms);
    if (problem.dsink.given()) FindSinkTerm(problem, b, h, block, terms);
    if (problem.dq.given()) ZeroUnseenRows(problem, plan, b, h, block, &memory[thread * thread_memory]);
  });
  if (products) {
    OnThreads(schedule.threads(), [&](int thread) {
      const amx::Alone tiles;
      KeyBlockTask<T, E> task(problem, plan, terms, schedule, &memory[thread * thread_memory]);
      for (BackwardSchedule::Task next; schedule.next(thread, next);) {
        task.run(next.group, next.first_key_block, next.key_blocks, &buffers[next.slot * buffer_size]);
        schedule.finish(next);
      }
    });
  }
  if (problem.dbias.given()) {
    ForEach(bias_tiles, threads, [&](std::int64_t tile, int thread) {
      BiasTask<T, E>(problem, plan, terms, &memory[thread * thread_memory]).run(tile);
    });
  }
  if (problem.dsink.given()) SumSinkGradient(problem, terms);
  return parts.bytes();
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
