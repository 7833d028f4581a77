#include "cuda/hopper/forward.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/errors.h"
#include "cuda/common/device_masks.h"
#include "cuda/hopper/attention.h"
#include "cuda/hopper/forward_args.h"
#include "cuda/hopper/forward_double.h"
#include "cuda/hopper/forward_kernels.h"
#include "cuda/hopper/maps.h"
#include "cuda/hopper/split_bf16.h"
#include "cuda/hopper/report.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {
namespace {

GroupForwardKernel kernel_of(const Problem& problem, bool general) {
  const int depth = padded_depth(problem);
  switch (problem.type) {
    case ElementType::float16: return group_forward_kernel_float16(depth, general);
    case ElementType::bfloat16: return group_forward_kernel_bfloat16(depth, general);
    default: return group_forward_kernel_float32(depth, general, bf16_term_count(problem));
  }
}

bool is_split(const Problem& problem) { return problem.type == ElementType::float32; }

bool serves(const Problem& problem, const ExecutionPlan& plan) {
  if (!has_groups(problem.device)) return false;
  if (is_split(problem) ? padded_depth(problem) > 128 || problem.d_v > 128 || !splits_exactly(problem.scale)
                        : problem.d_v > 256 || problem.d_qk % 8 != 0 || problem.d_v % 8 != 0)
    return false;
  if (problem.pages.page_size > 0 || problem.alibi.given()) return false;
  if (plan.masks_on_device && device_mask_tiles(problem, plan) == 0) return false;
  const auto results = problem.heads_q * problem.queries() * problem.d_v * int(element_size(problem.type));
  const bool changes_bits = is_split(problem) && bf16_term_count(problem) < kBf16Terms;  // else as the portable kernel
  return words_fit(problem, plan, true, 4 * results, changes_bits);
}

/// The workspace of a call: the report, mask words, and split-bfloat16 copies of float32 tensors.
struct Space {
  std::int64_t words, bf16_terms;
  std::int64_t first_split() const { return report_bytes + words; }
  std::int64_t bytes() const { return first_split() + bf16_terms; }
};

/// Describes q, k and v for splitting into bfloat16 terms. Returns the bytes that the terms take.
std::int64_t split_of(const Problem& problem, const ExecutionPlan& plan, char* memory, SplitArgs& bf16_terms) {
  bf16_terms.depth = padded_depth(problem), bf16_terms.bf16_terms = bf16_term_count(problem);
  bf16_terms.tensors[0] = split_rows_of(problem, problem.q, plan.query_grid, problem.heads_q, problem.d_qk);
  bf16_terms.tensors[1] = split_rows_of(problem, problem.k, plan.key_grid, problem.heads_kv, problem.d_qk);
  bf16_terms.tensors[2] = split_rows_of(problem, problem.v, plan.key_grid, problem.heads_kv, problem.d_v);
  return place_split(bf16_terms, 3, problem.batch, memory);
}

Space space_of(const Problem& problem, const ExecutionPlan& plan) {
  SplitArgs bf16_terms;
  return {word_workspace(problem, plan, true),
          is_split(problem) ? split_of(problem, plan, nullptr, bf16_terms) : std::int64_t{0}};
}

/// False if TMA does not support a tensor.
bool map_all(const Problem& problem, const ExecutionPlan& plan, const GroupForwardKernel& kernel,
             GroupForwardArgs& args) {
  if (problem.bias.given() && (!args.query_rows || !args.key_rows || !map_bias(args.bias_map, problem.bias) ||
                               static_cast<int>(element_size(problem.bias.type)) > kernel.bias_bytes))
    return false;
  if (is_split(problem)) return true;
  return map_rows(args.q_map, args.q, problem.d_qk, plan.query_grid, problem.heads_q, problem.batch) &&
         map_rows(args.k_map, args.k, problem.d_qk, plan.key_grid, problem.heads_kv, problem.batch) &&
         map_rows(args.v_map, args.v, problem.d_v, plan.key_grid, problem.heads_kv, problem.batch) &&
         map_rows(args.out_map, args.out, problem.d_v, plan.query_grid, problem.heads_q, problem.batch);
}

}  // namespace

std::int64_t group_forward_workspace(const Problem& problem, const ExecutionPlan& plan) {
  if (problem.type == ElementType::float64) return double_forward_workspace(problem, plan);
  return std::max(serves(problem, plan) ? space_of(problem, plan).bytes() : 0, attention_workspace(problem, plan));
}

Again group_forward(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& common, bool general,
                    DevicePlan& masks, char* workspace, cudaStream_t stream) {
  if (problem.type == ElementType::float64)
    return {double_forward(problem, plan, common, general, masks, workspace, stream)};
  if (const auto again = attention(problem, plan, common, general, masks, workspace, stream); again.any) return again;
  if (!serves(problem, plan)) return {};
  const auto kernel = kernel_of(problem, general);
  GroupForwardArgs args{};
  static_cast<ForwardArgs&>(args) = common;
  if (!map_all(problem, plan, kernel, args)) return {};
  check(cudaMemsetAsync(workspace, 0, report_bytes, stream), "clearing a counter");
  args.next_task = reinterpret_cast<std::int32_t*>(workspace), args.not_finite = args.next_task + 1;
  args.words = masks.words(true, workspace + report_bytes, args.not_finite);
  args.masks_on_device = plan.masks_on_device;
  args.queries = cut_of(plan.query_grid, args.query_rows), args.keys = cut_of(plan.key_grid, args.key_rows);
  args.factor = static_cast<float>(problem.scale);
  args.cap = static_cast<float>(problem.softcap);
  args.cap_inverse = problem.softcap > 0 ? 1.0f / args.cap : 0.0f;
  order_tasks(args, problem, (args.query_blocks + kernel.blocks - 1) / kernel.blocks,
              is_split(problem) ? 2 * bf16_term_count(problem) : 2);
  if (is_split(problem)) {
    SplitArgs bf16_terms;
    split_of(problem, plan, workspace + space_of(problem, plan).first_split(), bf16_terms);
    for (int n = 0; n < 3; ++n) args.bf16_terms[n] = bf16_terms.tensors[n].to;
    split_rows(bf16_terms, 3, problem.batch, stream);
    constexpr float product = kSplitScale * kSplitScale;
    args.factor /= product;
    if (!general) args.unit32 /= product, args.lag32 *= product;
  }
  allow_shared_memory(kernel.function, kernel.bytes, problem.device.index);
  launch(kernel.function, std::min(args.tasks, facts_of(problem.device).multiprocessors), kernel.threads, kernel.bytes,
         &args, stream);
  return {args.not_finite};
}

}  // namespace anyflash::cuda
