#include "cuda/hopper/backward.h"

#include "cuda/common/device.h"
#include "cuda/common/errors.h"
#include "cuda/hopper/backward_kernels.h"
#include "cuda/hopper/maps.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {
namespace {

/// What a call works in: dQ's sums, the number that reports a NaN, lse, delta and dlse.
struct Space {
  std::int64_t sums = 0, rows = 0;
  static constexpr std::int64_t report = 256;
  std::int64_t bytes() const { return sums + report + 3 * rows; }
};

Space space_of(const Problem& problem, const ExecutionPlan& plan) {
  Space space;
  space.rows = problem.batch * problem.heads_q * plan.query_grid.count() * 64 * 4;
  space.sums = space.rows * padded_depth(problem);
  return space;
}

GroupBackwardKernels kernels_of(const Problem& problem, bool general) {
  const int depth = padded_depth(problem);
  return problem.type == ElementType::float16 ? group_backward_kernels_float16(depth, general)
                                              : group_backward_kernels_bfloat16(depth, general);
}

/// Whole vectors, if it is given.
bool whole(const Rows& rows) { return !rows.data || rows.vectors; }

}  // namespace

bool group_backward_serves([[maybe_unused]] const Problem& problem, [[maybe_unused]] const ExecutionPlan& plan,
                           [[maybe_unused]] const BackwardArgs& args) {
#if defined(ANYFLASH_CUDA_HAS_GROUPS) && !defined(ANYFLASH_CUDA_SMALL_TILES)
  if (problem.type != ElementType::float16 && problem.type != ElementType::bfloat16) return false;
  if (plan.late) return false;  // nobody has counted the tiles whose words it would have to ask for
  if (problem.deterministic || problem.alibi.given() || facts_of(problem.device).major != 9) return false;
  if (problem.d_v > 256 || args.channels[0] % 8 != 0 || args.channels[1] % 8 != 0) return false;
  if (!(problem.dq.given() || problem.dk.given() || problem.dv.given())) return false;
  if (problem.bias.given() &&
      (problem.bias.type == ElementType::float64 || !args.sides[0].plain || !args.sides[1].plain))
    return false;
  for (const auto& side : args.sides)
    for (int n = 0; n < 2; ++n)
      if (!whole(side.rows[n]) || !whole(side.gradients[n])) return false;
  return word_bytes(plan, false) <= 4 * space_of(problem, plan).sums;  // linear in the sequences, whatever the rule
#else
  return false;
#endif
}

std::int64_t group_backward_workspace(const Problem& problem, const ExecutionPlan& plan) {
  return space_of(problem, plan).bytes();
}

GroupBackwardResult group_backward(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& common,
                                   DevicePlan& masks, char* workspace, cudaStream_t stream) {
  const auto space = space_of(problem, plan);
  const auto kernels = kernels_of(problem, common.general);
  GroupBackwardArgs args{};
  static_cast<BackwardArgs&>(args) = common;
  for (int side = 0; side < 2; ++side) {
    args.cuts[side] = cut_of(args.sides[side].grid, args.sides[side].plain);
    for (int n = 0; n < 2; ++n)
      if (!map_rows(args.maps[side][n], args.sides[side].rows[n], args.channels[n], args.sides[side].grid,
                    args.sides[side].heads, problem.batch))
        return {};
  }
  char* const rows = workspace + space.sums + Space::report;
  const auto numbers = [&](int n) { return reinterpret_cast<float*>(rows + n * space.rows); };
  args.has_dlse = problem.dlse.given();
  args.sums = reinterpret_cast<float*>(workspace);
  args.lse = numbers(0), args.delta = numbers(1), args.dlse = numbers(2);
  args.words = masks.words(false);
  args.factor = static_cast<float>(common.scale), args.cap = static_cast<float>(common.softcap);
  args.cap_inverse = args.cap > 0 ? 1.0f / args.cap : 0.0f;
  args.careful = reinterpret_cast<std::int32_t*>(workspace + space.sums);
  check(cudaMemsetAsync(workspace, 0, space.sums + Space::report, stream), "clearing sums");
  const auto &queries = args.sides[0], &keys = args.sides[1];
  const std::int64_t query_blocks = problem.batch * queries.heads * queries.blocks;
  if (query_blocks > 0) launch(prepare_rows_kernel(), query_blocks, 64, 0, &args, stream);
  allow_shared_memory(kernels.gradients, kernels.bytes, problem.device.index);
  const std::int64_t parts = (keys.blocks + kernels.key_blocks - 1) / kernels.key_blocks;
  if (const auto tasks = problem.batch * keys.heads * parts; tasks > 0)
    launch(kernels.gradients, tasks, kernels.threads, kernels.bytes, &args, stream);
  if (queries.gradients[0].data && query_blocks > 0) launch(kernels.store_queries, query_blocks, 128, 0, &args, stream);
  return {true, args.words ? args.careful : nullptr};
}

}  // namespace anyflash::cuda
