#include "cuda/hopper/forward_double.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/errors.h"
#include "cuda/hopper/forward_args.h"
#include "cuda/hopper/forward_double_kernels.h"
#include "cuda/hopper/maps.h"
#include "cuda/hopper/report.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {
namespace {

/// Is the call supported, apart from the alignment of rows and general scores?
bool serves(const Problem& problem, const ExecutionPlan& plan) {
  if (plan.masks_on_device || !has_groups(problem.device)) return false;
  if (problem.deterministic) return false;  // the fallback of any batch entry rounds differently
  if (padded_depth(problem) > 128 || problem.d_v > 128 || problem.pages.page_size > 0) return false;
  if (rules::volume(plan.query_grid.extent) != 128 || !ScaledExponentialTerms::bear(problem.scale)) return false;
  return words_fit(problem, plan, true, 4 * problem.heads_q * problem.queries() * problem.d_v * 8, true);
}

}  // namespace

std::int64_t double_forward_workspace(const Problem& problem, const ExecutionPlan& plan) {
  return serves(problem, plan) ? report_bytes + word_workspace(problem, plan, true) : 0;
}

const std::int32_t* double_forward(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& common,
                                   bool general, DevicePlan& masks, char* workspace, cudaStream_t stream) {
  if (general || !common.query_rows || !common.key_rows || !serves(problem, plan)) return nullptr;
  DoubleForwardArgs args{};
  static_cast<ForwardArgs&>(args) = common;
  const auto keys = problem.keys(), queries = problem.queries();
  if (!map_double_rows(args.q_map, args.q, problem.d_qk, queries, 64, problem.heads_q, problem.batch) ||
      !map_double_rows(args.k_map, args.k, problem.d_qk, keys, 16, problem.heads_kv, problem.batch) ||
      !map_double_rows(args.v_map, args.v, problem.d_v, keys, 16, problem.heads_kv, problem.batch))
    return nullptr;
  check(cudaMemsetAsync(workspace, 0, report_bytes, stream), "clearing a counter");
  args.next_task = reinterpret_cast<std::int32_t*>(workspace), args.not_finite = args.next_task + 1;
  args.words = masks.words(true, workspace + report_bytes, args.not_finite);
  args.exponential = ScaledExponentialTerms(problem.scale);
  order_tasks(args, problem, args.query_blocks, 8);
  const auto kernel = double_forward_kernel(padded_depth(problem));
  allow_shared_memory(kernel.function, kernel.bytes, problem.device.index);
  launch(kernel.function, std::min(args.tasks, facts_of(problem.device).multiprocessors), kernel.threads, kernel.bytes,
         &args, stream);
  return args.not_finite;
}

}  // namespace anyflash::cuda
