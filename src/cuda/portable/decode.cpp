// A forward call of few queries on a GPU: its kernels, its parts, the launches.
#include "cuda/portable/decode.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/memory.h"
#include "cuda/portable/decode_args.h"
#include "cuda/portable/decode_kernels.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {
namespace {

constexpr std::int64_t most_rows = 64;

std::int64_t rows_of(const Problem& problem) { return problem.queries() * (problem.heads_q / problem.heads_kv); }

DecodeKernels kernels_of(ElementType type, DecodeKind kind) {
  switch (type) {
    case ElementType::float16:
      return decode_kernels_float16(kind);
    case ElementType::bfloat16:
      return decode_kernels_bfloat16(kind);
    case ElementType::float32:
      return decode_kernels_float32(kind);
    default:
      return decode_kernels_float64(kind);
  }
}

DecodeKernels kernels_of(const Problem& problem) {
  const int depth = padded_depth(problem);
#if !defined(ANYFLASH_CUDA_SMALL_TILES)
  const auto& facts = facts_of(problem.device);
  const bool wide = element_size(problem.type) == 2 && depth <= 128 && rows_of(problem) > 16;
  const auto large = kernels_of(problem.type, {depth, wide ? DecodeTiling::wide : DecodeTiling::large});
  if (facts.major >= 8 && large.shared_bytes <= facts.shared_bytes) return large;
#endif
  return kernels_of(problem.type, {depth, DecodeTiling::small});
}

/// Parts, and key blocks of each: by what the masks show, or by the sizes alone where masks differ in the batch, since
/// results must not depend on what else is in it.
struct Cut {
  std::int64_t parts, part_blocks;
};

Cut cut_of(const Problem& problem, const ExecutionPlan& plan) {
  std::int64_t blocks = 0;
  if (plan.late || (plan.batch_groups == 1 && !problem.key_lengths.given()))  // late: what is seen with all keys
    for (const auto& run : plan.groups[0].keys_of_query_block.runs) blocks += run.count;
  if (blocks == 0) blocks = plan.key_grid.count();
  const auto block_bytes = static_cast<std::int64_t>(64 * (problem.d_qk + problem.d_v) * element_size(problem.type));
  const auto part_blocks = std::max((kPartBytes + block_bytes - 1) / block_bytes,
                                    (blocks + DecodeArgs::most_parts - 1) / DecodeArgs::most_parts);
  return {(blocks + part_blocks - 1) / part_blocks, part_blocks};
}

std::int64_t number_bytes(const Problem& problem) { return problem.type == ElementType::float64 ? 8 : 4; }

/// Bytes of what the parts leave: of their results, without their statistics.
std::int64_t result_bytes(const Problem& problem, const Cut& cut) {
  return problem.batch * problem.heads_kv * cut.parts * rows_of(problem) * problem.d_v * number_bytes(problem);
}

}  // namespace

bool decode_serves(const Problem& problem, const ExecutionPlan& plan) {
  return problem.dimensions == 1 && rows_of(problem) <= most_rows && plan.head_groups == 1 &&
         plan.query_grid.count() == 1 && plain_rows(problem, plan.query_grid) && plain_rows(problem, plan.key_grid);
}

std::int64_t decode_workspace(const Problem& problem, const ExecutionPlan& plan) {
  const auto cut = cut_of(problem, plan);
  if (cut.parts == 1) return 0;
  const auto results = result_bytes(problem, cut);
  return results + results / problem.d_v * 3;
}

void decode(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, bool general,
            cudaStream_t stream) {
  const auto kernels = kernels_of(problem);
  const auto cut = cut_of(problem, plan);
  DecodeArgs args{call, general, 0, 0, 0, 0, 0, nullptr, nullptr};
  args.queries = static_cast<std::int32_t>(problem.queries());
  args.rows = static_cast<std::int32_t>(rows_of(problem));
  args.row_parts = (args.rows + kernels.rows - 1) / kernels.rows;
  args.parts = static_cast<std::int32_t>(cut.parts), args.part_blocks = static_cast<std::int32_t>(cut.part_blocks);
  args.call.value_parts = static_cast<std::int32_t>((problem.d_v + kernels.values - 1) / kernels.values);
  const StreamMemory memory(decode_workspace(problem, plan), stream);
  if (args.parts > 1) args.results = memory.get(), args.statistics = memory.get() + result_bytes(problem, cut);
  const auto tasks = double(problem.batch) * double(problem.heads_kv) * double(args.parts) * args.row_parts *
                     args.call.value_parts;
  const auto rows = double(problem.batch) * double(problem.heads_q) * args.queries;
  check_tasks(std::max(tasks, rows));
  allow_shared_memory(kernels.parts, kernels.shared_bytes, problem.device.index);
  launch(kernels.parts, static_cast<std::int64_t>(tasks), kernels.threads, kernels.shared_bytes, &args, stream);
  if (args.parts > 1) {
    const bool early = facts_of(problem.device).major >= 9;
    launch(kernels.join, static_cast<std::int64_t>(rows), DecodeKernels::join_threads, 0, &args, stream, early);
  }
}

}  // namespace anyflash::cuda
