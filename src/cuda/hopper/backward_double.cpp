#include "cuda/hopper/backward_double.h"

#include "cuda/common/device.h"
#include "cuda/hopper/backward.h"
#include "cuda/hopper/backward_double_kernels.h"
#include "cuda/hopper/maps.h"
#include "cuda/hopper/report.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {
namespace {

/// The workspace of a call: the sums of dQ, the report, lse, delta and dlse, mask words.
struct Space {
  std::int64_t sums, rows, words;
  std::int64_t first_words() const { return sums + report_bytes + 3 * rows; }
  std::int64_t bytes() const { return first_words() + words; }
};

Space space_of(const Problem& problem, const ExecutionPlan& plan) {
  const auto rows = problem.batch * problem.heads_q * plan.query_grid.count() * 64 * 8;
  return {rows * padded_depth(problem), rows, word_workspace(problem, plan, false)};
}

}  // namespace

bool double_backward_serves(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& args) {
  if (plan.masks_on_device || problem.deterministic || args.general) return false;
  if (padded_depth(problem) > 128) return false;
  if (!(problem.dq.given() || problem.dk.given() || problem.dv.given())) return false;
  for (const auto& side : args.sides)
    if (!side.plain || !whole(side.rows[0]) || !whole(side.rows[1])) return false;
  return words_fit(problem, plan, false, 4 * space_of(problem, plan).sums / problem.batch, true);
}

std::int64_t double_backward_workspace(const Problem& problem, const ExecutionPlan& plan) {
  return space_of(problem, plan).bytes();
}

GroupBackwardResult double_backward(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& common,
                                    DevicePlan& masks, char* workspace, const PortableTerms& terms,
                                    cudaStream_t stream) {
  const auto space = space_of(problem, plan);
  const auto kernels = double_backward_kernels(padded_depth(problem));
  DoubleBackwardArgs args{};
  static_cast<BackwardArgs&>(args) = common;
  for (int side = 0; side < 2; ++side)
    for (int n = 0; n < 2; ++n)
      if (!map_double_rows(args.maps[side][n], args.sides[side].rows[n], args.channels[n],
                           args.sides[side].grid.size[2], side == 0 ? 16 : 64, args.sides[side].heads, problem.batch))
        return {};
  char* const report = workspace + space.sums;
  const auto numbers = [&](int n) { return reinterpret_cast<double*>(report + report_bytes + n * space.rows); };
  args.has_dlse = problem.dlse.given();
  args.sums = reinterpret_cast<double*>(workspace);
  args.lse = numbers(0), args.delta = numbers(1), args.dlse = numbers(2);
  args.not_finite = reinterpret_cast<std::int32_t*>(report);
  args.terms.any_large_lse = args.not_finite + 1;
  const auto &queries = args.sides[0], &keys = args.sides[1];
  allow_shared_memory(kernels.gradients, kernels.bytes, problem.device.index);
  if (queries.gradients[0].data) allow_shared_memory(kernels.store_queries, 0, problem.device.index);
  const std::int64_t query_blocks = problem.batch * queries.heads * queries.blocks;
  check(cudaMemsetAsync(report, 0, report_bytes, stream), "clearing what is reported");
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

}  // namespace anyflash::cuda
