#include "cuda/hopper/backward.h"

#include "cuda/common/device.h"
#include "cuda/common/errors.h"
#include "cuda/hopper/backward_kernels.h"
#include "cuda/hopper/maps.h"
#include "cuda/hopper/pieces.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {
namespace {

bool in_pieces(const Problem& problem) { return problem.type == ElementType::float32; }

/// What a call works in: dQ's sums, the number that reports a NaN, lse, delta and dlse, pieces of float32.
struct Space {
  std::int64_t sums = 0, rows = 0, pieces = 0;
  static constexpr std::int64_t report = 256;
  std::int64_t first_pieces() const { return sums + report + 3 * rows; }
  std::int64_t bytes() const { return first_pieces() + pieces; }
};

/// q, dout, k and v, to be split. Returns the bytes that their pieces take.
std::int64_t pieces_of(const Problem& problem, const ExecutionPlan& plan, char* memory, PieceArgs& pieces) {
  pieces.depth = padded_depth(problem);
  pieces.tensors[0] = piece_rows_of(problem, problem.q, plan.query_grid, problem.heads_q, problem.d_qk);
  pieces.tensors[1] = piece_rows_of(problem, problem.dout, plan.query_grid, problem.heads_q, problem.d_v);
  pieces.tensors[2] = piece_rows_of(problem, problem.k, plan.key_grid, problem.heads_kv, problem.d_qk);
  pieces.tensors[3] = piece_rows_of(problem, problem.v, plan.key_grid, problem.heads_kv, problem.d_v);
  return place_pieces(pieces, 4, problem.batch, memory);
}

Space space_of(const Problem& problem, const ExecutionPlan& plan) {
  Space space;
  space.rows = problem.batch * problem.heads_q * plan.query_grid.count() * 64 * 4;
  space.sums = space.rows * padded_depth(problem);
  PieceArgs pieces;
  if (in_pieces(problem)) space.pieces = pieces_of(problem, plan, nullptr, pieces);
  return space;
}

GroupBackwardKernels kernels_of(const Problem& problem, bool general) {
  if (in_pieces(problem)) return group_backward_kernels_float32();
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
  if (problem.type == ElementType::float64) return false;
  if (plan.late) return false;  // nobody has counted the tiles whose words it would have to ask for
  if (problem.deterministic || problem.alibi.given() || facts_of(problem.device).major != 9) return false;
  if (in_pieces(problem) ? padded_depth(problem) > 64 || problem.d_v > 64 || args.general || !bears_pieces(args.scale)
                         : problem.d_v > 256 || args.channels[0] % 8 != 0 || args.channels[1] % 8 != 0)
    return false;
  if (!(problem.dq.given() || problem.dk.given() || problem.dv.given())) return false;
  if (problem.bias.given() &&
      (problem.bias.type == ElementType::float64 || !args.sides[0].plain || !args.sides[1].plain))
    return false;
  for (const auto& side : args.sides)
    for (int n = 0; n < 2 && !in_pieces(problem); ++n)
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
    for (int n = 0; n < 2 && !in_pieces(problem); ++n)
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
  args.product_size = 1;
  if (in_pieces(problem)) {
    PieceArgs pieces;
    pieces_of(problem, plan, workspace + space.first_pieces(), pieces);
    for (int n = 0; n < 4; ++n) args.pieces[n / 2][n % 2] = pieces.tensors[n].to;
    split_rows(pieces, 4, problem.batch, stream);
    args.product_size = kPieceScale * kPieceScale;
    args.key_factors[0] = args.factor / (args.product_size * kPieceScale), args.key_factors[1] = 1 / args.product_size;
    args.factor /= args.product_size;
  }
  check(cudaMemsetAsync(workspace, 0, space.sums + Space::report, stream), "clearing sums");
  const auto &queries = args.sides[0], &keys = args.sides[1];
  const std::int64_t query_blocks = problem.batch * queries.heads * queries.blocks;
  if (query_blocks > 0) launch(prepare_rows_kernel(), query_blocks, 64, 0, &args, stream);
  allow_shared_memory(kernels.gradients, kernels.bytes, problem.device.index);
  const std::int64_t parts = (keys.blocks + kernels.key_blocks - 1) / kernels.key_blocks;
  if (const auto tasks = problem.batch * keys.heads * parts; tasks > 0)
    launch(kernels.gradients, tasks, kernels.threads, kernels.bytes, &args, stream);
  if (queries.gradients[0].data && query_blocks > 0) launch(kernels.store_queries, query_blocks, 128, 0, &args, stream);
  return {true, args.words || in_pieces(problem) ? args.careful : nullptr};  // pieces make NaN of infinities
}

}  // namespace anyflash::cuda
