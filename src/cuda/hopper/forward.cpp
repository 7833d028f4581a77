#include "cuda/hopper/forward.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/errors.h"
#include "cuda/common/stream_counters.h"
#include "cuda/hopper/attention.h"
#include "cuda/hopper/forward_args.h"
#include "cuda/hopper/maps.h"
#include "cuda/hopper/split_bf16.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {
namespace {

/// Queues a kernel, by as many thread blocks as run at once: they take tasks until there are none. bytes: of one number
/// of keys and values, as the kernel reads them.
template <class Args>
Again queue(const Problem& problem, const GroupForwardKernel& kernel, int bytes, Args& args, DevicePlan& masks,
            char* workspace, cudaStream_t stream) {
  constexpr std::int64_t cached_bytes = 20 << 20;  // of keys and values whose tasks are interleaved, to share L2
  check(cudaMemsetAsync(workspace, 0, counter_bytes, stream), "clearing counters");
  args.next_task = reinterpret_cast<std::int32_t*>(workspace), args.not_finite = args.next_task + 1;
  args.words = masks.words(true, workspace + counter_bytes, args.not_finite);
  const auto heads = problem.batch * problem.heads_q;
  args.head_parts = (args.query_blocks + kernel.blocks - 1) / kernel.blocks;
  args.tasks = static_cast<std::int32_t>(heads * args.head_parts);
  const auto head_bytes = problem.keys() * (problem.d_qk + problem.d_v) * bytes;
  const auto near = std::max(cached_bytes / std::max(head_bytes, std::int64_t{1}), std::int64_t{1}) * args.group_heads;
  args.near_heads = static_cast<std::int32_t>(std::min(near, heads));
  allow_shared_memory(kernel.function, kernel.bytes, problem.device.index);
  launch(kernel.function, std::min(args.tasks, facts_of(problem.device).multiprocessors), kernel.threads, kernel.bytes,
         &args, stream);
  return {args.not_finite};
}

// --- float32 ---------------------------------------------------------------------------------------------------------

/// Is it float32 that forward_split.cuh supports?
bool serves_split(const Problem& problem, const ExecutionPlan& plan) {
  if (!has_groups(problem.device) || problem.type != ElementType::float32) return false;
  if (padded_depth(problem) > 128 || problem.d_v > 128 || !splits_exactly(problem.scale)) return false;
  if (problem.pages.page_size > 0 || problem.alibi.given() || plan.masks_on_device) return false;
  const auto results = problem.heads_q * problem.queries() * problem.d_v * int(element_size(problem.type));
  const bool changes_bits = bf16_term_count(problem) < kBf16Terms;  // else as the portable kernel
  return words_fit(problem, plan, true, 4 * results, changes_bits);
}

Again split_forward(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& common, bool general,
                    DevicePlan& masks, char* workspace, cudaStream_t stream) {
  if (!serves_split(problem, plan)) return {};
  const auto kernel = split_forward_kernel(padded_depth(problem), general, bf16_term_count(problem));
  SplitForwardArgs args{};
  static_cast<ForwardArgs&>(args) = common;
  if (problem.bias.given() && (!args.query_rows || !args.key_rows || !map_bias(args.bias_map, problem.bias))) return {};
  args.queries = cut_of(plan.query_grid, args.query_rows), args.keys = cut_of(plan.key_grid, args.key_rows);
  args.cap = static_cast<float>(problem.softcap);
  args.cap_inverse = problem.softcap > 0 ? 1.0f / args.cap : 0.0f;
  const auto split = split_of(problem, plan, workspace + counter_bytes + word_workspace(problem, plan, true));
  for (int n = 0; n < 3; ++n) args.bf16_terms[n] = split.tensors[n].to;
  split_rows(split, stream);
  constexpr float product = kSplitScale * kSplitScale;
  args.factor = static_cast<float>(problem.scale) / product;
  if (!general) args.unit32 /= product, args.lag32 *= product;
  return queue(problem, kernel, 2 * bf16_term_count(problem), args, masks, workspace, stream);
}

// --- float64 ---------------------------------------------------------------------------------------------------------

/// Is the call supported, apart from the alignment of rows and general scores?
bool serves_double(const Problem& problem, const ExecutionPlan& plan) {
  if (plan.masks_on_device || !has_groups(problem.device)) return false;
  if (problem.deterministic) return false;  // the fallback of any batch entry rounds differently
  if (padded_depth(problem) > 128 || problem.d_v > 128 || problem.pages.page_size > 0) return false;
  if (rules::volume(plan.query_grid.extent) != 128 || !ScaledExponentialTerms::bear(problem.scale)) return false;
  return words_fit(problem, plan, true, 4 * problem.heads_q * problem.queries() * problem.d_v * 8, true);
}

Again double_forward(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& common, bool general,
                     DevicePlan& masks, char* workspace, cudaStream_t stream) {
  if (general || !common.query_rows || !common.key_rows || !serves_double(problem, plan)) return {};
  DoubleForwardArgs args{};
  static_cast<ForwardArgs&>(args) = common;
  const auto keys = problem.keys(), queries = problem.queries();
  if (!map_double_rows(args.q_map, args.q, problem.d_qk, queries, 64, problem.heads_q, problem.batch) ||
      !map_double_rows(args.k_map, args.k, problem.d_qk, keys, 16, problem.heads_kv, problem.batch) ||
      !map_double_rows(args.v_map, args.v, problem.d_v, keys, 16, problem.heads_kv, problem.batch))
    return {};
  args.exponential = ScaledExponentialTerms(problem.scale);
  return queue(problem, double_forward_kernel(padded_depth(problem)), 8, args, masks, workspace, stream);
}

}  // namespace

std::int64_t group_forward_workspace(const Problem& problem, const ExecutionPlan& plan) {
  if (element_size(problem.type) == 2) return attention_workspace(problem, plan);
  const bool split = problem.type == ElementType::float32;
  if (!(split ? serves_split(problem, plan) : serves_double(problem, plan))) return 0;
  return counter_bytes + word_workspace(problem, plan, true) + (split ? split_of(problem, plan, nullptr).bytes() : 0);
}

Again group_forward(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& args, bool general,
                    DevicePlan& masks, char* workspace, cudaStream_t stream) {
  switch (problem.type) {
    case ElementType::float64: return double_forward(problem, plan, args, general, masks, workspace, stream);
    case ElementType::float32: return split_forward(problem, plan, args, general, masks, workspace, stream);
    default: return attention(problem, plan, args, general, masks, workspace, stream);
  }
}

}  // namespace anyflash::cuda
