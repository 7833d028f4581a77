#include "cuda/hopper/backward.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/device_masks.h"
#include "cuda/common/errors.h"
#include "cuda/common/memory.h"
#include "cuda/common/stream_counters.h"
#include "cuda/hopper/backward_kernels.h"
#include "cuda/hopper/maps.h"
#include "cuda/hopper/split_bf16.h"
#include "cuda/portable/launch.h"
#include "problem/tensor.h"

namespace anyflash::cuda {
namespace {

bool is_split(const Problem& problem) { return problem.type == ElementType::float32; }
bool is_double(const Problem& problem) { return problem.type == ElementType::float64; }

/// Which kernel computes the bias's gradient, and how.
enum class BiasGradient : std::uint8_t {
  none,      ///< no kernel
  stored,    ///< the kernel stores dS
  summed,    ///< the kernel adds dS to float32 sums
  portable,  ///< the portable kernel, for a bias broadcast along queries or keys, or added to capped scores
};

/// Can TMA load it, as 16-bit numbers?
bool copied(const Bias& bias) {
  if (element_size(bias.type) != 2 || bias.stride[3] != 1 || reinterpret_cast<std::uintptr_t>(bias.data) % 16 != 0)
    return false;
  for (int i = 0; i < 3; ++i)
    if (bias.stride[i] < 0 || (bias.size[i] > 1 && bias.stride[i] % 8 != 0)) return false;
  return true;
}

std::int64_t bias_sum_bytes(const Problem& problem, const ExecutionPlan& plan) {
  return problem.dbias.size[0] * problem.dbias.size[1] * plan.query_grid.count() * plan.key_grid.count() * 4096 * 4;
}

BiasGradient bias_gradient(const Problem& problem, const ExecutionPlan& plan) {
  const auto& bias = problem.dbias;
  if (!bias.given()) return BiasGradient::none;
  if (problem.softcap > 0 || bias.size[2] != problem.queries() || bias.size[3] != problem.keys())
    return BiasGradient::portable;
  const bool whole = bias.size[0] == problem.batch && bias.size[1] == problem.heads_q;
  if (whole && bias.type == problem.type && copied(bias) && copied(problem.bias)) return BiasGradient::stored;
  const auto numbers = bias.size[0] * bias.size[1] * bias.size[2] * bias.size[3];
  return bias_sum_bytes(problem, plan) <= 4 * 4 * numbers ? BiasGradient::summed : BiasGradient::portable;
}

/// The workspace of a call: the sums of dQ and of the bias's gradient, the report, lse, delta and dlse, mask words, and
/// split-bfloat16 copies of float32 tensors.
struct Space {
  std::int64_t sums = 0, bias = 0, rows = 0, words = 0, bf16_terms = 0;
  std::int64_t first_words() const { return sums + bias + counter_bytes + 3 * rows; }
  std::int64_t first_split() const { return first_words() + words; }
  std::int64_t bytes() const { return first_split() + bf16_terms; }
};

Space space_of(const Problem& problem, const ExecutionPlan& plan) {
  Space space;
  space.rows = problem.batch * problem.heads_q * plan.query_grid.count() * 64 * (is_double(problem) ? 8 : 4);
  space.sums = space.rows * padded_depth(problem);
  if (bias_gradient(problem, plan) == BiasGradient::summed) space.bias = bias_sum_bytes(problem, plan);
  space.words = word_workspace(problem, plan, false);
  if (is_split(problem)) space.bf16_terms = split_of(problem, plan, nullptr).bytes();
  return space;
}

/// Sets the places of the kernels' numbers, each a T, and of the report.
template <class T, class Args>
void place(const Problem& problem, const Space& space, char* workspace, Args& args) {
  char* const report = workspace + space.sums + space.bias;
  const auto numbers = [&](int n) { return reinterpret_cast<T*>(report + counter_bytes + n * space.rows); };
  args.has_dlse = problem.dlse.given();
  args.sums = reinterpret_cast<T*>(workspace);
  args.lse = numbers(0), args.delta = numbers(1), args.dlse = numbers(2);
  args.not_finite = reinterpret_cast<std::int32_t*>(report);
  args.terms.any_large_lse = args.not_finite + 1;
}

/// Are all tiles visited?
bool visits_all(const ExecutionPlan& plan) {
  if (plan.masks_on_device) return false;  // masks found on the GPU: unknown
  for (const auto& group : plan.groups) {
    std::int64_t tiles = 0;
    for (const auto& run : group.queries_of_key_block.runs) tiles += run.count;
    if (tiles != plan.query_grid.count() * plan.key_grid.count()) return false;
  }
  return true;
}

/// Zeroes a bias's gradient. Rows at equal distances, along whichever axes, are cleared by one call.
void clear(const Bias& bias, cudaStream_t stream) {
  struct Axis {
    std::int64_t size, stride;
  } axes[3] = {{1, bias.size[3]}, {1, 0}, {1, 0}};
  int order[3] = {0, 1, 2}, last = -1;
  std::sort(order, order + 3, [&](int a, int b) { return bias.stride[a] < bias.stride[b]; });
  for (const int i : order) {
    if (bias.size[i] == 1) continue;
    if (last >= 0 && bias.stride[i] == axes[last].size * axes[last].stride) axes[last].size *= bias.size[i];
    else axes[++last] = {bias.size[i], bias.stride[i]};
  }
  const auto& [rows, inner, outer] = axes;
  for (std::int64_t o = 0; o < outer.size; ++o)
    for (std::int64_t i = 0; i < inner.size; ++i)
      check(cudaMemset2DAsync(bias.data + (o * outer.stride + i * inner.stride) * 2, rows.stride * 2, 0,
                              bias.size[3] * 2, rows.size, stream),
            "clearing dbias");
}

GroupBackwardKernels kernels_of(const Problem& problem, ScoreKind kind) {
  const int depth = padded_depth(problem);
  if (is_double(problem)) return group_backward_kernels_float64(depth);
  if (is_split(problem)) return group_backward_kernels_float32(depth, bf16_term_count(problem));
  return problem.type == ElementType::float16 ? group_backward_kernels<ElementType::float16>(depth, kind)
                                              : group_backward_kernels<ElementType::bfloat16>(depth, kind);
}

/// False if TMA does not support a tensor; the gradients of keys may also be stored without it.
bool map_all(const Problem& problem, GroupBackwardArgs& args) {
  for (int side = 0; side < 2; ++side) {
    args.cuts[side] = cut_of(args.sides[side].grid, args.sides[side].plain);
    for (int n = 0; n < 2 && !is_split(problem); ++n)
      if (!map_rows(args.maps[side][n], args.sides[side].rows[n], args.channels[n], args.sides[side].grid,
                    args.sides[side].heads, problem.batch))
        return false;
  }
  args.key_gradients_copied = !is_split(problem);
  for (int n = 0; n < 2; ++n) {
    const auto& side = args.sides[1];
    if (args.key_gradients_copied && side.gradients[n].data)
      args.key_gradients_copied = map_rows(args.key_gradient_maps[n], side.gradients[n], args.channels[n], side.grid,
                                           side.heads, problem.batch);
  }
  return true;
}

/// Queues the split of float32 tensors into bfloat16 terms in `memory`, and sets the factors of their sums.
void split(const Problem& problem, const ExecutionPlan& plan, char* memory, GroupBackwardArgs& args,
           cudaStream_t stream) {
  const auto bf16_terms = split_of(problem, plan, memory);
  for (int n = 0; n < 4; ++n) args.bf16_terms[n / 2][n % 2] = bf16_terms.tensors[n].to;
  split_rows(bf16_terms, stream);
  constexpr float product = kSplitScale * kSplitScale;
  args.key_factors[0] = args.factor / (product * kSplitScale), args.key_factors[1] = 1 / product;
  args.factor /= product;
}

// --- float64 ---------------------------------------------------------------------------------------------------------

GroupBackwardResult double_backward(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& common,
                                    DevicePlan& masks, char* workspace, const PortableTerms& terms,
                                    cudaStream_t stream) {
  const auto space = space_of(problem, plan);
  const auto kernels = kernels_of(problem, ScoreKind::scaled);
  DoubleBackwardArgs args{};
  static_cast<BackwardArgs&>(args) = common;
  for (int side = 0; side < 2; ++side)
    for (int n = 0; n < 2; ++n)
      if (!map_double_rows(args.maps[side][n], args.sides[side].rows[n], args.channels[n],
                           args.sides[side].grid.size[2], side == 0 ? 16 : 64, args.sides[side].heads, problem.batch))
        return {};
  place<double>(problem, space, workspace, args);
  const auto &queries = args.sides[0], &keys = args.sides[1];
  allow_shared_memory(kernels.gradients, kernels.bytes, problem.device.index);
  if (queries.gradients[0].data) allow_shared_memory(kernels.store_queries, 0, problem.device.index);
  const std::int64_t query_blocks = problem.batch * queries.heads * queries.blocks;
  check(cudaMemsetAsync(args.not_finite, 0, counter_bytes, stream), "clearing counters");
  terms.find(args);
  launch(kernels.prepare, query_blocks, 128, 0, &args, stream);
  terms.find_rests(args);
  args.words = masks.words(false, workspace + space.first_words(), args.not_finite);
  const auto parts = (keys.blocks + kernels.key_blocks - 1) / kernels.key_blocks;
  const auto blocks = problem.batch * keys.heads * parts;
  // One head after the other: one chain of sums over all heads that share a key head would lose more accuracy.
  for (args.group_head = 0; args.group_head < args.group_heads; ++args.group_head)
    launch(kernels.gradients, blocks, kernels.threads, kernels.bytes, &args, stream);
  if (queries.gradients[0].data) launch(kernels.store_queries, query_blocks, kernels.store_threads, 0, &args, stream);
  return {true, false, args.not_finite};
}

}  // namespace

bool group_backward_serves(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& args) {
  if (!has_groups(problem.device) || problem.deterministic) return false;
  if (!(problem.dq.given() || problem.dk.given() || problem.dv.given())) return false;
  const bool of_16_bits = element_size(problem.type) == 2;
  if (plan.masks_on_device && (is_double(problem) || device_mask_tiles(problem, plan) == 0)) return false;
  if (of_16_bits ? problem.d_v > 256 || args.channels[0] % 8 != 0 || args.channels[1] % 8 != 0 ||
                       !alibi_is_linear(problem, plan)
                 : padded_depth(problem) > 128 || args.general)
    return false;
  if (is_split(problem) && !splits_exactly(args.scale)) return false;
  const bool plain = args.sides[0].plain && args.sides[1].plain;
  if (!plain && (is_double(problem) || problem.bias.given())) return false;
  if (problem.bias.type == ElementType::float64 && problem.bias.given()) return false;
  for (const auto& side : args.sides)
    for (int n = 0; n < 2; ++n)
      if ((!is_split(problem) && !whole(side.rows[n])) || (of_16_bits && !whole(side.gradients[n]))) return false;
  return words_fit(problem, plan, false, 4 * space_of(problem, plan).sums / problem.batch, true);
}

std::int64_t group_backward_workspace(const Problem& problem, const ExecutionPlan& plan) {
  return space_of(problem, plan).bytes();
}

GroupBackwardResult group_backward(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& common,
                                   DevicePlan& masks, char* workspace, const PortableTerms& terms,
                                   cudaStream_t stream) {
  if (is_double(problem)) return double_backward(problem, plan, common, masks, workspace, terms, stream);
  const auto space = space_of(problem, plan);
  GroupBackwardArgs args{};
  static_cast<BackwardArgs&>(args) = common;
  if (!map_all(problem, args)) return {};
  const auto bias = bias_gradient(problem, plan);
  // One bias row for all queries: if two warpgroups shared a tile (backward_wide.cuh), one would read the row where the
  // other already stores dS.
  const bool shared_row = padded_depth(problem) > 128 && args.bias.query == 0;
  args.bias_copied =
      problem.bias.given() && !shared_row && copied(problem.bias) && map_bias(args.bias_map, problem.bias);
  const bool single = problem.bias.given() && !args.bias_copied;
  const auto kernels = kernels_of(problem, !common.general ? ScoreKind::scaled
                                           : single        ? ScoreKind::any
                                                           : ScoreKind::finished);
  allow_shared_memory(kernels.gradients, kernels.bytes, problem.device.index);
  if (common.sides[0].gradients[0].data) allow_shared_memory(kernels.store_queries, 0, problem.device.index);
  if (bias == BiasGradient::summed) allow_shared_memory(kernels.store_bias, 0, problem.device.index);
  args.bias_stored = bias == BiasGradient::stored;
  if (args.bias_stored && !(args.bias_copied && map_bias(args.bias_gradient_map, problem.dbias))) return {};
  place<float>(problem, space, workspace, args);
  args.next_task = args.not_finite + 2;
  args.bias_sums = bias == BiasGradient::summed ? reinterpret_cast<float*>(workspace + space.sums) : nullptr;
  args.factor = static_cast<float>(common.scale), args.cap = static_cast<float>(common.softcap);
  args.cap_inverse = args.cap > 0 ? 1.0f / args.cap : 0.0f;
  args.alibi_offset = alibi_offset(plan);
  if (is_split(problem)) {
    split(problem, plan, workspace + space.first_split(), args, stream);
    terms.find(args);
  }
  const auto &queries = args.sides[0], &keys = args.sides[1];
  const std::int64_t query_blocks = problem.batch * queries.heads * queries.blocks;
  launch(kernels.prepare, query_blocks, 128, 0, &args, stream);
  terms.find_rests(args);
  args.words = masks.words(false, workspace + space.first_words(), args.not_finite);
  args.masks_on_device = plan.masks_on_device;
  if (args.bias_sums) check(cudaMemsetAsync(args.bias_sums, 0, space.bias, stream), "clearing sums");
  const bool clears = args.bias_stored && !visits_all(plan);
  if (clears) clear(problem.dbias, stream);
  const std::int64_t parts = (keys.blocks + kernels.key_blocks - 1) / kernels.key_blocks;
  args.tasks = static_cast<std::int32_t>(problem.batch * keys.heads * parts);
  const auto blocks = is_split(problem) ? args.tasks : std::min(args.tasks, facts_of(problem.device).multiprocessors);
  const bool early = !is_split(problem);  // float32's kernels have no wait of their own
  // In a CUDA graph only a kernel may let the next one begin early.
  const bool behind_kernel = !(args.bias_sums || clears) || !capturing(stream);
  launch(kernels.gradients, blocks, kernels.threads, kernels.bytes, &args, stream, early && behind_kernel);
  if (queries.gradients[0].data)
    launch(kernels.store_queries, query_blocks, kernels.store_threads, 0, &args, stream, early);
  if (args.bias_sums) launch(kernels.store_bias, space.bias / (4096 * 4), 128, 0, &args, stream);
  return {true, args.bias_stored || args.bias_sums, args.not_finite};
}

}  // namespace anyflash::cuda
