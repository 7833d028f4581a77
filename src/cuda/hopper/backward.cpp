#include "cuda/hopper/backward.h"

#include <cuda.h>

#include "cuda/common/device.h"
#include "cuda/common/errors.h"
#include "cuda/hopper/backward_kernels.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {
namespace {

/// What a call works in: dQ's sums, the number that reports a NaN, shifts, deltas, the words that the plan's tables do
/// not have.
struct Space {
  std::int64_t sums = 0, rows = 0, words = 0;
  static constexpr std::int64_t report = 256;
  std::int64_t bytes() const { return sums + report + 2 * rows + words; }
};

Space space_of(const Problem& problem, const ExecutionPlan& plan) {
  Space space;
  space.rows = problem.batch * problem.heads_q * plan.query_grid.count() * 64 * 4;
  space.sums = space.rows * padded_depth(problem);
  for (const auto& group : plan.groups)
    for (const auto& run : group.queries_of_key_block.runs)
      if (run.kind != TileClass::full) space.words += run.count * std::int64_t{512};
  return space;
}

GroupBackwardKernels kernels_of(const Problem& problem) {
  const int depth = padded_depth(problem);
  return problem.type == ElementType::float16 ? group_backward_kernels_float16(depth)
                                              : group_backward_kernels_bfloat16(depth);
}

/// Describes rows to the copy engine: boxes of 64 channels of as many rows as `blocks` of a side's have. False if it
/// does not take them.
bool map_rows(CUtensorMap& map, const Rows& rows, std::int64_t channels, std::int64_t size, std::int64_t heads,
              std::int64_t batch, int blocks) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const auto status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(
        status == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr);
  }();
  if (!encode) return false;
  const auto extent = [](std::int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t sizes[] = {extent(channels), extent(size), extent(heads), extent(batch)};
  const cuuint64_t strides[] = {extent(rows.sequence[2] * 2), extent(rows.head * 2), extent(rows.batch * 2)};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(64 * blocks), 1, 1}, steps[] = {1, 1, 1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, rows.data, sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/// Whole vectors, if it is given.
bool whole(const Rows& rows) { return !rows.data || rows.vectors; }

}  // namespace

bool group_backward_serves([[maybe_unused]] const Problem& problem, [[maybe_unused]] const ExecutionPlan& plan,
                           [[maybe_unused]] const BackwardArgs& args) {
#if defined(ANYFLASH_CUDA_HAS_GROUPS) && !defined(ANYFLASH_CUDA_SMALL_TILES)
  if (problem.type != ElementType::float16 && problem.type != ElementType::bfloat16) return false;
  if (plan.late) return false;  // nobody has counted the tiles whose words it would have to ask for
  if (problem.deterministic || args.general || facts_of(problem.device).major != 9) return false;
  if (problem.d_v > 256 || args.channels[0] % 8 != 0 || args.channels[1] % 8 != 0) return false;
  if (problem.dlse.given()) return false;  // dP - delta may be far smaller than either, and dlse with it
  if (problem.dbias.given() || !(problem.dq.given() || problem.dk.given() || problem.dv.given())) return false;
  for (const auto& side : args.sides)
    for (int n = 0; n < 2; ++n)
      if (!whole(side.rows[n]) || !whole(side.gradients[n])) return false;
  const auto space = space_of(problem, plan);
  return space.words <= 4 * space.sums;  // linear in the sequences, whatever the rule
#else
  return false;
#endif
}

std::int64_t group_backward_workspace(const Problem& problem, const ExecutionPlan& plan) {
  return space_of(problem, plan).bytes();
}

const std::int32_t* group_backward(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& common,
                                   char* workspace, cudaStream_t stream) {
  const auto space = space_of(problem, plan);
  const auto kernels = kernels_of(problem);
  char* const rows = workspace + space.sums + Space::report;
  GroupBackwardArgs args{common,
                         {},
                         true,
                         reinterpret_cast<float*>(workspace),
                         reinterpret_cast<float*>(rows),
                         reinterpret_cast<float*>(rows + space.rows),
                         reinterpret_cast<std::uint64_t*>(rows + 2 * space.rows),
                         static_cast<float>(common.scale),
                         reinterpret_cast<std::int32_t*>(workspace + space.sums)};
  for (int side = 0; side < 2; ++side)
    for (int n = 0; n < 2; ++n)
      args.mapped =
          args.mapped && args.sides[side].plain &&
          map_rows(args.maps[side][n], args.sides[side].rows[n], args.channels[n], args.sides[side].grid.size[2],
                   args.sides[side].heads, problem.batch, side == 0 ? kernels.query_blocks : kernels.key_blocks);
  check(cudaMemsetAsync(workspace, 0, space.sums + Space::report, stream), "clearing sums");
  const auto &queries = args.sides[0], &keys = args.sides[1];
  const std::int64_t query_blocks = problem.batch * queries.heads * queries.blocks;
  if (query_blocks > 0) launch(prepare_rows_kernel(), query_blocks, 64, 0, &args, stream);
  if (space.words > 0)
    launch(ask_all_words_kernel(), static_cast<std::int64_t>(plan.groups.size()) * keys.blocks, 64, 0, &args, stream);
  allow_shared_memory(kernels.gradients, kernels.bytes, problem.device.index);
  const std::int64_t parts = (keys.blocks + kernels.key_blocks - 1) / kernels.key_blocks;
  if (const auto tasks = problem.batch * keys.heads * parts; tasks > 0)
    launch(kernels.gradients, tasks, kernels.threads, kernels.bytes, &args, stream);
  if (queries.gradients[0].data && query_blocks > 0) launch(kernels.store_queries, query_blocks, 128, 0, &args, stream);
  return space.words > 0 ? args.careful : nullptr;
}

}  // namespace anyflash::cuda
