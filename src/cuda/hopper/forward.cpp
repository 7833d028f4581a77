#include "cuda/hopper/forward.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/errors.h"
#include "cuda/common/late_masks.h"
#include "cuda/hopper/attention.h"
#include "cuda/hopper/forward_args.h"
#include "cuda/hopper/forward_double.h"
#include "cuda/hopper/forward_kernels.h"
#include "cuda/hopper/maps.h"
#include "cuda/hopper/pieces.h"
#include "cuda/hopper/report.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {
namespace {

GroupForwardKernel kernel_of(const Problem& problem, bool general) {
  const int depth = padded_depth(problem);
  switch (problem.type) {
    case ElementType::float16: return group_forward_kernel_float16(depth, general);
    case ElementType::bfloat16: return group_forward_kernel_bfloat16(depth, general);
    default: return group_forward_kernel_float32(depth, general, piece_count(problem));
  }
}

bool in_pieces(const Problem& problem) { return problem.type == ElementType::float32; }

bool serves(const Problem& problem, const ExecutionPlan& plan) {
  if (!has_groups(problem.device)) return false;
  if (in_pieces(problem) ? padded_depth(problem) > 128 || problem.d_v > 128 || !bears_pieces(problem.scale)
                         : problem.d_v > 256 || problem.d_qk % 8 != 0 || problem.d_v % 8 != 0)
    return false;
  if (problem.pages.page_size > 0 || problem.alibi.given()) return false;
  if (plan.late && late_word_tiles(problem, plan) == 0) return false;
  const auto results = problem.heads_q * problem.queries() * problem.d_v * int(element_size(problem.type));
  const bool changes_bits = in_pieces(problem) && piece_count(problem) < kPieces;  // else as the portable kernel
  return words_fit(problem, plan, true, 4 * results, changes_bits);
}

/// The workspace of a call: the report, mask words, and split-bfloat16 copies of float32 tensors.
struct Space {
  std::int64_t words, pieces;
  std::int64_t first_pieces() const { return report_bytes + words; }
  std::int64_t bytes() const { return first_pieces() + pieces; }
};

/// Describes q, k and v for splitting into bfloat16 terms. Returns the bytes that the terms take.
std::int64_t pieces_of(const Problem& problem, const ExecutionPlan& plan, char* memory, PieceArgs& pieces) {
  pieces.depth = padded_depth(problem), pieces.pieces = piece_count(problem);
  pieces.tensors[0] = piece_rows_of(problem, problem.q, plan.query_grid, problem.heads_q, problem.d_qk);
  pieces.tensors[1] = piece_rows_of(problem, problem.k, plan.key_grid, problem.heads_kv, problem.d_qk);
  pieces.tensors[2] = piece_rows_of(problem, problem.v, plan.key_grid, problem.heads_kv, problem.d_v);
  return place_pieces(pieces, 3, problem.batch, memory);
}

Space space_of(const Problem& problem, const ExecutionPlan& plan) {
  PieceArgs pieces;
  return {word_workspace(problem, plan, true),
          in_pieces(problem) ? pieces_of(problem, plan, nullptr, pieces) : std::int64_t{0}};
}

/// False if TMA does not support a tensor.
bool map_all(const Problem& problem, const ExecutionPlan& plan, const GroupForwardKernel& kernel,
             GroupForwardArgs& args) {
  if (problem.bias.given() && (!args.query_rows || !args.key_rows || !map_bias(args.bias_map, problem.bias) ||
                               static_cast<int>(element_size(problem.bias.type)) > kernel.bias_bytes))
    return false;
  if (in_pieces(problem)) return true;
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
  args.next_task = reinterpret_cast<std::int32_t*>(workspace), args.careful = args.next_task + 1;
  args.words = masks.words(true, workspace + report_bytes, args.careful);
  args.late = plan.late;
  args.queries = cut_of(plan.query_grid, args.query_rows), args.keys = cut_of(plan.key_grid, args.key_rows);
  args.factor = static_cast<float>(problem.scale);
  args.cap = static_cast<float>(problem.softcap);
  args.cap_inverse = problem.softcap > 0 ? 1.0f / args.cap : 0.0f;
  order_tasks(args, problem, (args.query_blocks + kernel.blocks - 1) / kernel.blocks,
              in_pieces(problem) ? 2 * piece_count(problem) : 2);
  if (in_pieces(problem)) {
    PieceArgs pieces;
    pieces_of(problem, plan, workspace + space_of(problem, plan).first_pieces(), pieces);
    for (int n = 0; n < 3; ++n) args.pieces[n] = pieces.tensors[n].to;
    split_rows(pieces, 3, problem.batch, stream);
    constexpr float product = kPieceScale * kPieceScale;
    args.factor /= product;
    if (!general) args.unit32 /= product, args.lag32 *= product;
  }
  allow_shared_memory(kernel.function, kernel.bytes, problem.device.index);
  launch(kernel.function, std::min(args.tasks, facts_of(problem.device).multiprocessors), kernel.threads, kernel.bytes,
         &args, stream);
  return {args.careful};
}

}  // namespace anyflash::cuda
