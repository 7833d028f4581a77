#include "cuda/hopper/attention.h"

#include <algorithm>
#include <utility>

#include "cuda/common/device.h"
#include "cuda/common/device_masks.h"
#include "cuda/common/errors.h"
#include "cuda/common/stream_counters.h"
#include "cuda/hopper/attention_args.h"
#include "cuda/hopper/maps.h"
#include "cuda/portable/decode.h"
#include "cuda/portable/launch.h"
#include "plan/runs.h"

namespace anyflash::cuda {
namespace {

constexpr std::int64_t section_bytes = std::int64_t{32} << 20;  ///< of K and V that thread blocks share in the L2

bool is_plain(const Problem& problem, const ExecutionPlan& plan) {
  return plain_rows(problem, plan.query_grid) && plain_rows(problem, plan.key_grid);
}

/// How many tasks the query heads of a key head make, if each warpgroup has a head: so it is where a sequence is one
/// query block. 0: the warpgroups have query blocks of one head.
std::int64_t packs_of(const Problem& problem, const ExecutionPlan& plan, std::int64_t warpgroups) {
  const auto group = problem.heads_q / std::max(problem.heads_kv, std::int64_t{1});
  const bool packed = warpgroups > 1 && group > 1 && plan.query_grid.count() == 1 && plan.head_groups == 1;
  return packed ? (group + warpgroups - 1) / warpgroups : 0;
}

/// Are tasks of one query block faster? By some query blocks of the first mask. Where masks may differ in the batch, by
/// the rule alone, since results must not depend on what else is in it.
bool is_sparse(const Problem& problem, const ExecutionPlan& plan) {
  const auto& group = plan.groups[0];
  const auto& list = group.keys_of_query_block;
  const auto blocks = static_cast<std::int64_t>(list.start.size()) - 1;
  const bool plain = is_plain(problem, plan);
  const int depth = padded_depth(problem);
  if (depth > 128 || (depth == 128 && plain)) return false;
  if (plan.masks_on_device || may_differ_in_batch(problem) || blocks <= 0) {
    const auto ragged = [](auto& a) { return a.kind == rules::AtomKind::blocks || a.kind == rules::AtomKind::dense; };
    return depth == 64 &&
           (!plain || std::any_of(group.program.atoms, group.program.atoms + group.program.atom_count, ragged));
  }
  // One key block costs a query block alone 0.62 of what a step of 128 keys costs it beside others of its task
  // (docs/notes/hopper-forward.md).
  const std::int64_t together = depth == 64 ? 3 : 2, samples = 8;  // query blocks of a task; tasks that are looked at
  const auto tasks = (blocks + together - 1) / together, asked = std::min(tasks, samples);
  const auto packs = packs_of(problem, plan, together), heads = packs > 0 ? problem.heads_q / problem.heads_kv : 1;
  double dense = 0, sparse = 0;
  for (std::int64_t sample = 0; sample < asked; ++sample) {
    const auto first = (2 * sample + 1) * tasks / (2 * asked) * together;
    dense += static_cast<double>(std::max<std::int64_t>(packs, 1) * together *
                                 ((planning::visited_by_any(list, first, together) + 1) / 2));
    for (int n = 0; n < together; ++n)
      sparse += 0.62 * static_cast<double>(heads * planning::visited_by_any(list, first + n, 1));
  }
  return sparse < dense;
}

/// How a call is computed.
struct Choice {
  AttentionKernel kernel;
  KeyParts parts;
  std::int64_t packs, tiles, heads, tasks;  ///< tiles of a head; heads of all batch entries, or packs
};
Choice choose(const Problem& problem, const ExecutionPlan& plan, bool general) {
  const auto kernel = problem.type == ElementType::float16 ? attention_kernel<ElementType::float16>
                                                           : attention_kernel<ElementType::bfloat16>;
  const int depth = padded_depth(problem);
  Choice choice{};
  const auto set_kind = [&](AttentionKind kind) {
    choice.kernel = kernel(depth, kind);
    choice.packs = kind == AttentionKind::plain ? packs_of(problem, plan, choice.kernel.blocks) : 0;
    choice.tiles = (plan.query_grid.count() + choice.kernel.blocks - 1) / choice.kernel.blocks;
    choice.heads = problem.batch * (choice.packs > 0 ? problem.heads_kv * choice.packs : problem.heads_q);
    choice.tasks = choice.heads * choice.tiles;
  };
  const bool sparse = !general && is_sparse(problem, plan);
  set_kind(general ? AttentionKind::general : AttentionKind::plain);
  if (!general) choice.parts = key_parts(problem, plan, choice.kernel.keys, choice.tasks, sparse);
  if (sparse && choice.parts.count == 1) set_kind(AttentionKind::sparse);
  if (choice.packs > 0 || choice.parts.count > 1) choice.kernel = kernel(depth, AttentionKind::split);
  choice.tasks *= choice.parts.count;
  return choice;
}

/// Of what is noted of each query block of each head, for each part of the keys.
std::int64_t noted_bytes(const Problem& problem, const ExecutionPlan& plan, const KeyParts& parts) {
  return (problem.batch * problem.heads_q * plan.query_grid.count() * parts.count + 255) / 256 * 256;
}

/// False if TMA does not take a tensor, as it lies.
bool map_all(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, const AttentionKernel& kernel,
             AttentionArgs& args) {
  const auto map = [&](RowMap& to, const Rows& rows, std::int64_t channels, const Grid& grid, std::int64_t heads) {
    return map_rows(to, rows, channels, grid, heads, problem.batch);
  };
  const Grid steps{plan.key_grid.size, {{1, 1, kernel.keys}}, {{1, 1, 1}}};
  const bool plain = is_plain(problem, plan);
  if (problem.bias.given() && !(plain && map_bias(args.bias_map, problem.bias) &&
                                static_cast<int>(element_size(problem.bias.type)) <= kernel.bias_bytes))
    return false;
  return call.out.vectors && map(args.out_map, call.out, problem.d_v, plan.query_grid, problem.heads_q) &&
         map(args.q, call.q, problem.d_qk, plan.query_grid, problem.heads_q) &&
         (!plain || (map(args.k, call.k, problem.d_qk, steps, problem.heads_kv) &&
                     map(args.v, call.v, problem.d_v, steps, problem.heads_kv))) &&
         map(args.k_block, call.k, problem.d_qk, plan.key_grid, problem.heads_kv) &&
         map(args.v_block, call.v, problem.d_v, plan.key_grid, problem.heads_kv);
}

/// How many of `heads`, of which `group` share a key head, run at a time so that their K and V fit the L2; where tasks
/// are short, that all thread blocks are at work once, so that memory is read all the time. All sections have about as
/// many, so that the last one has tasks enough for all thread blocks.
std::int32_t section_heads(const Problem& problem, std::int64_t heads, std::int64_t group, std::int64_t tiles,
                           std::int64_t thread_blocks) {
  constexpr std::int64_t few_tiles = 8;
  const auto bytes = 2 * problem.keys() * (problem.d_qk + problem.d_v);
  const std::int64_t wave = std::max<std::int64_t>(thread_blocks / std::max<std::int64_t>(tiles, 1), 1);
  const auto near = std::min({std::max(section_bytes / std::max(bytes, std::int64_t{1}), std::int64_t{1}) * group,
                              heads, tiles <= few_tiles ? wave : heads});
  const auto sections = std::max(heads / near, std::int64_t{1}), each = (heads + sections - 1) / sections;
  return static_cast<std::int32_t>((each + group - 1) / group * group);
}

void describe(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, const Choice& choice,
              std::int32_t thread_blocks, AttentionArgs& args) {
  args.out = call.out, args.lse = call.lse, args.row_sum = call.row_sum, args.row_max = call.row_max;
  const bool pair = call.row_sum.data || call.row_max.data;
  args.maxima = pair && !problem.near_maxima;
  args.stores_lse_or_pair = pair || call.lse.data, args.has_sink_or_pair = pair || call.sink.data;
  args.bias = call.bias, args.alibi = call.alibi, args.sink = call.sink, args.alibi_offset = alibi_offset(plan);
  args.heads = call.heads, args.group = call.group_heads, args.d_v = call.d_v;
  args.queries = static_cast<std::int32_t>(problem.queries());
  args.query_cut = cut_of(plan.query_grid, call.query_rows), args.key_cut = cut_of(plan.key_grid, call.key_rows);
  args.groups = call.groups, args.batch_groups = call.batch_groups, args.head_groups = call.head_groups;
  args.masks_on_device = plan.masks_on_device;
  args.tiles = static_cast<std::int32_t>(choice.tiles), args.tasks = static_cast<std::int32_t>(choice.tasks);
  args.packs = static_cast<std::int32_t>(choice.packs);
  args.section_heads =
      section_heads(problem, choice.heads, choice.packs > 0 ? choice.packs : args.group, args.tiles, thread_blocks);
  args.parts = static_cast<std::int32_t>(choice.parts.count);
  args.part_blocks = static_cast<std::int32_t>(choice.parts.blocks);
  args.first_block = static_cast<std::int32_t>(choice.parts.first);
  args.early = padded_depth(problem) == 128 && !plan.groups[0].program.has_documents && args.tasks >= 8 * thread_blocks;
  args.scale = static_cast<float>(problem.scale), args.scale_log2 = call.unit32;
  args.cap = static_cast<float>(problem.softcap), args.cap_inverse = problem.softcap > 0 ? 1.0f / args.cap : 0.0f;
}

}  // namespace

bool attention_serves(const Problem& problem, const ExecutionPlan& plan) {
  if (!has_groups(problem.device) || element_size(problem.type) != 2) return false;
  if (problem.d_v > 256 || problem.d_qk % 8 != 0 || problem.d_v % 8 != 0) return false;
  if (problem.pages.page_size > 0 || !alibi_is_linear(problem, plan)) return false;
  // Whether words have room decides between kernels that round differently: never by what else is in the batch.
  if (plan.masks_on_device &&
      (device_mask_tiles(problem, plan) == 0 || (problem.deterministic && may_differ_in_batch(problem))))
    return false;
  return words_fit(problem, plan, true, 8 * problem.heads_q * problem.queries() * problem.d_v, problem.deterministic);
}

std::int64_t attention_workspace(const Problem& problem, const ExecutionPlan& plan) {
  if (!attention_serves(problem, plan)) return 0;
  const auto parts = choose(problem, plan, is_general(problem)).parts;
  return counter_bytes + noted_bytes(problem, plan, parts) + part_bytes(problem, parts) +
         word_workspace(problem, plan, true);
}

Again attention(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, bool general,
                DevicePlan& masks, char* workspace, cudaStream_t stream) {
  if (!attention_serves(problem, plan)) return {};
  const auto choice = choose(problem, plan, general);
  const auto& kernel = choice.kernel;
  const auto thread_blocks = facts_of(problem.device).multiprocessors * kernel.on_multiprocessor;
  AttentionArgs args{};
  if (!map_all(problem, plan, call, kernel, args)) return {};
  describe(problem, plan, call, choice, thread_blocks, args);
  allow_shared_memory(kernel.function, kernel.bytes, problem.device.index);
  StreamCounters counters(problem.device.index, stream);
  const bool lasting = counters.get();
  if (!lasting) check(cudaMemsetAsync(workspace, 0, counter_bytes, stream), "clearing counters");
  args.next_task = lasting ? counters.get() : reinterpret_cast<std::int32_t*>(workspace);
  args.again = args.next_task + 1;
  args.again_blocks = reinterpret_cast<std::uint8_t*>(workspace + counter_bytes);
  workspace += counter_bytes + noted_bytes(problem, plan, choice.parts);
  args.results = reinterpret_cast<float*>(workspace);
  args.statistics = args.results + part_rows(problem, choice.parts) * problem.d_v;
  args.words = masks.words(true, workspace + part_bytes(problem, choice.parts), args.again);
  launch(kernel.function, std::min(args.tasks, thread_blocks), kernel.threads, kernel.bytes, &args, stream, lasting);
  if (args.parts > 1) join_parts(problem, call, args.parts, args.results, args.statistics, stream);
  return {args.again, args.again_blocks, args.parts, std::move(counters)};
}

}  // namespace anyflash::cuda
