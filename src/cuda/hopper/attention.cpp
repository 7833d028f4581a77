#include "cuda/hopper/attention.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/errors.h"
#include "cuda/common/device_masks.h"
#include "cuda/hopper/attention_args.h"
#include "cuda/hopper/attention_kernels.h"
#include "cuda/hopper/maps.h"
#include "cuda/hopper/report.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {
namespace {

constexpr std::int64_t section_bytes = std::int64_t{32} << 20;  ///< of K and V that thread blocks share in the L2

/// At 64 channels: does a query block visit so few keys that the kernel of forward.cuh is as fast? By some blocks of the first mask; by
/// the sizes alone where masks may differ in the batch, since results must not depend on what else is in it.
bool has_short_tasks(const Problem& problem, const ExecutionPlan& plan) {
#if defined(ANYFLASH_NO_SHORT_TASKS)  // so that tests of small calls reach this kernel
  constexpr std::int64_t few = 0;
#else
  constexpr std::int64_t few = 12;  // key blocks
#endif
  if (padded_depth(problem) > 64) return false;
  constexpr std::int64_t sample = 64;  // query blocks
  const auto& list = plan.groups[0].keys_of_query_block;
  const auto blocks = static_cast<std::int64_t>(list.start.size()) - 1;
  if (plan.masks_on_device || may_differ_in_batch(problem) || blocks <= 0) return plan.key_grid.count() < few;
  const auto step = std::max(blocks / sample, std::int64_t{1}), asked = (blocks + step - 1) / step;
  std::int64_t visited = 0;
  for (std::int64_t block = 0; block < blocks; block += step)
    for (auto i = list.start[block]; i < list.start[block + 1]; ++i) visited += list.runs[i].count;
  return visited < few * asked;
}

/// All but how the tensors lie. docs/design.md has the conditions.
bool serves(const Problem& problem, const ExecutionPlan& plan) {
  if (!has_groups(problem.device) || element_size(problem.type) != 2) return false;
  if (problem.d_v > 256 || problem.d_qk % 8 != 0 || problem.d_v % 8 != 0) return false;
  if (!plain_rows(problem, plan.query_grid) || !plain_rows(problem, plan.key_grid)) return false;  // boxes: forward.cuh
  if (problem.pages.page_size > 0 || problem.alibi.given()) return false;
  // Whether words have room decides between kernels that round differently: never by what else is in the batch.
  if (plan.masks_on_device &&
      (device_mask_tiles(problem, plan) == 0 || (problem.deterministic && plan.batch_groups > 1)))
    return false;
  return words_fit(problem, plan, true, 8 * problem.heads_q * problem.queries() * problem.d_v, problem.deterministic) &&
         !has_short_tasks(problem, plan);
}

/// Do neighbouring query blocks visit other key blocks?
bool is_ragged(const ExecutionPlan& plan) {
  const auto& program = plan.groups[0].program;
  return std::any_of(program.atoms, program.atoms + program.atom_count, [](const rules::Atom& atom) {
    return atom.kind == rules::AtomKind::blocks || atom.kind == rules::AtomKind::dense;
  });
}

/// Of what is noted of each query block of each head.
std::int64_t noted_bytes(const Problem& problem, const ExecutionPlan& plan) {
  return (problem.batch * problem.heads_q * plan.query_grid.count() + 255) / 256 * 256;
}

/// False if TMA does not take a tensor, as it lies.
bool map_all(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, const AttentionKernel& kernel,
             AttentionArgs& args) {
  const auto map = [&](RowMap& to, const Rows& rows, std::int64_t channels, const Grid& grid, std::int64_t heads) {
    return map_rows(to, rows, channels, grid, heads, problem.batch);
  };
  const Grid steps{plan.key_grid.size, {{1, 1, kernel.keys}}, {{1, 1, 1}}};
  if (problem.bias.given() && !(map_bias(args.bias_map, problem.bias) &&
                                static_cast<int>(element_size(problem.bias.type)) <= kernel.bias_bytes))
    return false;
  return call.out.vectors && map(args.out_map, call.out, problem.d_v, plan.query_grid, problem.heads_q) &&
         map(args.q, call.q, problem.d_qk, plan.query_grid, problem.heads_q) &&
         map(args.k, call.k, problem.d_qk, steps, problem.heads_kv) &&
         map(args.v, call.v, problem.d_v, steps, problem.heads_kv) &&
         map(args.k_block, call.k, problem.d_qk, plan.key_grid, problem.heads_kv) &&
         map(args.v_block, call.v, problem.d_v, plan.key_grid, problem.heads_kv);
}

/// How many heads run at a time so that their K and V fit the L2; where tasks are short, that all thread blocks are at
/// work once, so that memory is read all the time. All sections have about as many heads, so that the last one has tasks
/// enough for all thread blocks.
std::int32_t section_heads(const Problem& problem, std::int64_t group, std::int64_t tiles) {
  constexpr std::int64_t few_tiles = 8;
  const auto heads = problem.batch * problem.heads_q, bytes = 2 * problem.keys() * (problem.d_qk + problem.d_v);
  const std::int64_t wave =
      std::max<std::int64_t>(facts_of(problem.device).multiprocessors / std::max<std::int64_t>(tiles, 1), 1);
  const auto near = std::min({std::max(section_bytes / std::max(bytes, std::int64_t{1}), std::int64_t{1}) * group,
                              heads, tiles <= few_tiles ? wave : heads});
  const auto sections = std::max(heads / near, std::int64_t{1}), each = (heads + sections - 1) / sections;
  return static_cast<std::int32_t>((each + group - 1) / group * group);
}

void describe(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, int blocks,
              AttentionArgs& args) {
  args.out = call.out, args.lse = call.lse, args.row_sum = call.row_sum, args.row_max = call.row_max;
  args.bias = call.bias, args.sink = call.sink;
  args.heads = call.heads, args.group = call.group_heads, args.d_v = call.d_v;
  args.queries = static_cast<std::int32_t>(problem.queries());
  args.query_cut = cut_of(plan.query_grid, call.query_rows), args.key_cut = cut_of(plan.key_grid, call.key_rows);
  args.groups = call.groups, args.batch_groups = call.batch_groups, args.head_groups = call.head_groups;
  args.masks_on_device = plan.masks_on_device;
  args.tiles = (call.query_blocks + blocks - 1) / blocks;
  args.tasks = static_cast<std::int32_t>(problem.batch * problem.heads_q * args.tiles);
  args.section_heads = section_heads(problem, call.group_heads, args.tiles);
  args.early = padded_depth(problem) == 128 && args.tasks >= 8 * facts_of(problem.device).multiprocessors;
  args.scale = static_cast<float>(problem.scale), args.scale_log2 = call.unit32;
  args.cap = static_cast<float>(problem.softcap), args.cap_inverse = problem.softcap > 0 ? 1.0f / args.cap : 0.0f;
}

}  // namespace

std::int64_t attention_workspace(const Problem& problem, const ExecutionPlan& plan) {
  if (!serves(problem, plan)) return 0;
  return report_bytes + noted_bytes(problem, plan) + word_workspace(problem, plan, true);
}

Again attention(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, bool general,
                DevicePlan& masks, char* workspace, cudaStream_t stream) {
  if (!serves(problem, plan)) return {};
  const auto of_type = problem.type == ElementType::float16 ? attention_kernel_float16 : attention_kernel_bfloat16;
  const auto kernel = of_type(padded_depth(problem), general, is_ragged(plan));
  AttentionArgs args{};
  if (!map_all(problem, plan, call, kernel, args)) return {};
  describe(problem, plan, call, kernel.blocks, args);
  const auto cleared = report_bytes + noted_bytes(problem, plan);
  check(cudaMemsetAsync(workspace, 0, cleared, stream), "clearing a counter");
  args.next_task = reinterpret_cast<std::int32_t*>(workspace), args.again = args.next_task + 1;
  args.again_blocks = reinterpret_cast<std::uint8_t*>(workspace + report_bytes);
  args.words = masks.words(true, workspace + cleared, args.again);
  allow_shared_memory(kernel.function, kernel.bytes, problem.device.index);
  launch(kernel.function, std::min(args.tasks, facts_of(problem.device).multiprocessors), kernel.threads, kernel.bytes,
         &args, stream);
  return {args.again, args.again_blocks};
}

}  // namespace anyflash::cuda
