// A decode call on a GPU: its kernels, its parts (split-KV), the launches.
#include "cuda/portable/decode.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/device_masks.h"
#include "cuda/common/device_plan.h"
#include "cuda/hopper/attention.h"
#include "cuda/hopper/decode.h"
#include "cuda/portable/decode_args.h"
#include "cuda/portable/decode_kernels.h"
#include "cuda/portable/launch.h"
#include "rules/words.h"

namespace anyflash::cuda {
namespace {

constexpr std::int64_t most_rows = 64, most_group_rows = 256;

std::int64_t rows_of(const Problem& problem) {
  return problem.queries() * (problem.heads_q / std::max(problem.heads_kv, std::int64_t{1}));
}

DecodeKernels kernels_of(ElementType type, DecodeKind kind) {
  switch (type) {
    case ElementType::float16: return decode_kernels_float16(kind);
    case ElementType::bfloat16: return decode_kernels_bfloat16(kind);
    case ElementType::float32: return decode_kernels_float32(kind);
    default: return decode_kernels_float64(kind);
  }
}

DecodeKernels kernels_of(const Problem& problem, [[maybe_unused]] bool plain) {
  const int depth = padded_depth(problem);
#if !defined(ANYFLASH_CUDA_SMALL_TILES)
  const auto& facts = facts_of(problem.device);
  const auto rows = rows_of(problem);
  const bool half = element_size(problem.type) == 2;
  const auto tiling = half && plain && rows <= 8          ? DecodeTiling::narrow
                      : half && depth <= 128 && rows > 16 ? DecodeTiling::wide
                                                          : DecodeTiling::large;
  const auto kernels = kernels_of(problem.type, {depth, tiling});
  if (facts.major >= 8 && kernels.shared_bytes <= facts.shared_bytes) return kernels;
#endif
  return kernels_of(problem.type, {depth, DecodeTiling::small});
}

std::int64_t number_bytes(const Problem& problem) { return problem.type == ElementType::float64 ? 8 : 4; }

/// The number of key blocks visited. It follows from the masks, or from sizes only if masks may differ in the batch:
/// results must not depend on other batch entries.
std::int64_t visited_blocks(const Problem& problem, const ExecutionPlan& plan) {
  std::int64_t blocks = 0;
  if (plan.masks_on_device || !may_differ_in_batch(problem))  // masks found on the GPU: as if all keys existed
    for (const auto& run : plan.groups[0].keys_of_query_block.runs) blocks += run.count;
  return blocks > 0 ? blocks : plan.key_grid.count();
}

/// The number of parts, and of key blocks in each.
struct Cut {
  std::int64_t parts, part_blocks;

  Cut(std::int64_t blocks, std::int64_t wanted) {
    wanted = std::clamp<std::int64_t>(wanted, 1, DecodeArgs::most_parts);
    part_blocks = std::max<std::int64_t>((blocks + wanted - 1) / wanted, 1);
    parts = std::max<std::int64_t>((blocks + part_blocks - 1) / part_blocks, 1);
  }
};

std::int64_t block_bytes(const Problem& problem) {
  return static_cast<std::int64_t>(64 * (problem.d_qk + problem.d_v) * element_size(problem.type));
}

/// The same in any batch.
Cut cut_of(const Problem& problem, const ExecutionPlan& plan) {
  const auto blocks = visited_blocks(problem, plan), bytes = blocks * block_bytes(problem);
  const auto part_bytes =
      std::max({std::int64_t{kPartBytes}, kPartBlocks * block_bytes(problem), bytes * problem.heads_kv / kPartsOfEntry,
                kPartResults * rows_of(problem) * problem.d_v * number_bytes(problem)});
  return {blocks, (bytes + part_bytes - 1) / part_bytes};
}

/// Enough parts to give every multiprocessor a task and none two; two tasks, where the rows take several. One part, if
/// heads alone give most multiprocessors a task: they then read about as fast as all would. Where lengths may differ,
/// parts are short enough that nothing waits for the longest entry. Partial results of several queries are large: their
/// parts are longer, as long as half of the multiprocessors have a task.
Cut cut_for_machine(const Problem& problem, const ExecutionPlan& plan) {
  const auto blocks = visited_blocks(problem, plan), bytes = blocks * block_bytes(problem);
  const auto row_parts = std::max((rows_of(problem) + most_rows - 1) / most_rows, std::int64_t{1});
  const auto heads = std::max<std::int64_t>(problem.batch * problem.heads_kv * row_parts, 1);
  const auto machine = facts_of(problem.device).multiprocessors * std::min<std::int64_t>(row_parts, 2);
  const bool few_heads = kFewHeads * heads <= machine;
  if (bytes <= kPartBytes && !few_heads) return {blocks, 1};
  const auto least = few_heads && rows_of(problem) <= 16 ? kLeastPartBytes / 2 : kLeastPartBytes;
  const auto each = 5 * heads >= 3 * machine ? 1 : machine / heads;
  const auto longer = problem.queries() > 1 ? std::max(bytes / kPartBytes, each / 2) : each;
  const auto parts = std::min({each, longer, bytes / least, std::int64_t{kPartsJoined}});
  const bool even = !plan.masks_on_device && !problem.key_lengths.given();
  return {blocks, even ? parts : std::max(parts, bytes / kMostPartBytes)};
}

/// Has a multiprocessor at most one task, of a call that reads more than one part of kPartBytes?
bool is_alone(const Problem& problem, const ExecutionPlan& plan, const Cut& cut) {
  return visited_blocks(problem, plan) * block_bytes(problem) > kPartBytes &&
         problem.batch * problem.heads_kv * cut.parts <= facts_of(problem.device).multiprocessors;
}

/// Bytes of the parts' partial results, without their statistics.
std::int64_t result_bytes(const Problem& problem, const Cut& cut) {
  return problem.batch * problem.heads_kv * cut.parts * rows_of(problem) * problem.d_v * number_bytes(problem);
}

/// The program of a mask. Batch entries without keys have none.
const rules::Program& program_of(const ExecutionPlan& plan) {
  for (const auto& group : plan.groups)
    if (rules::volume(group.program.k_size()) > 0) return group.program;
  return plan.groups[0].program;
}

/// Does every query see all keys that its batch entry has?
bool sees_all(const Problem& problem, const ExecutionPlan& plan) {
  const auto& program = program_of(plan);
  const auto all = [&](const rules::Atom& atom) {
    return atom.kind == rules::AtomKind::causal && !atom.negated && problem.queries() == 1 &&
           problem.align == Align::none_end;
  };
  return !program.has_documents && program.conjunction &&
         std::all_of(program.atoms, program.atoms + program.atom_count, all);
}

/// Could batch entries have masks of their own, in a larger batch?
bool may_differ(const Problem& problem, const ExecutionPlan& plan) {
  const auto& program = plan.groups[0].program;
  return problem.key_lengths.given() || program.has_documents ||
         std::any_of(program.atoms, program.atoms + program.atom_count,
                     [](const rules::Atom& atom) { return atom.data != nullptr; });
}

/// Are the visited key blocks consecutive and the same in all batch entries, and full except a few? If so, the blocks
/// are stored in args. words: with the words of the only query.
bool find_blocks(const ExecutionPlan& plan, bool words, DecodeArgs& args) {
  const auto& group = plan.groups[0];
  if (plan.masks_on_device || plan.batch_groups > 1) return false;
  int partial = 0;
  args.first_block = args.end_block = 0, args.partial[0] = args.partial[1] = -1;
  for (const auto& run : group.keys_of_query_block.runs) {
    if (args.end_block == 0) args.first_block = args.end_block = run.first;
    if (run.first != args.end_block) return false;
    args.end_block += run.count;
    if (run.kind == TileClass::full) continue;
    for (auto block = run.first; block < args.end_block; ++block) {
      if (partial == DecodeArgs::partial_blocks) return false;
      args.partial[partial] = block;
      args.words[partial++] = words ? rules::word(group.program, {{0, 0, 0}}, plan.key_grid.box(block)) : 0;
    }
  }
  return true;
}

/// Tells the kernels which keys exist.
void find_keys(const Problem& problem, const ExecutionPlan& plan, DecodeArgs& args) {
  args.keys = plan.masks_on_device ? static_cast<std::int32_t>(problem.keys()) : plan.groups[0].program.axis[2].k_size;
  args.by_length = sees_all(problem, plan);
  args.length_in_mask = !plan.masks_on_device && plan.batch_groups > 1;
  args.lengths = integers_of(plan.masks_on_device ? problem.key_lengths : TensorView());
}

/// May the kernels copy whole rows of K and V?
bool has_whole_rows(const DecodeKernels& kernels, const DecodeArgs& args) {
  const auto& call = args.call;
  return !args.general && call.k.vectors && call.v.vectors && call.whole_channels &&
         (!call.paged || call.pages.page_size % kernels.keys == 0);
}

/// Are there so few tasks that 16-bit calls of some more rows are faster split over their keys? Only Hopper's kernels
/// do so; the number of tasks depends on the batch.
bool has_few_tasks(const Problem& problem) {
  return bulk_decode_serves(problem) && !problem.deterministic && rows_of(problem) <= most_group_rows &&
         problem.batch * problem.heads_kv * ((rows_of(problem) + 127) / 128) <=
             facts_of(problem.device).multiprocessors;
}

/// Is Hopper's forward kernel, which has two heads of a key head in a task, faster at such a call? Measured at 128 and
/// 256 channels. It is slower if it needs more tasks, up to 128 rows, where memory is the bound, and below some 12 tasks,
/// where the launches of its other kernels are a large part of the time; or if its tasks leave many multiprocessors idle
/// and it does not split the keys (docs/notes/gpu-decode.md).
bool forward_is_faster(const Problem& problem, const ExecutionPlan& plan) {
  const std::int64_t machine = facts_of(problem.device).multiprocessors, depth = padded_depth(problem);
  const auto rows = rows_of(problem), of_decode = (rows + 127) / 128, of_forward = (rows / problem.queries() + 1) / 2;
  const auto tasks = problem.batch * problem.heads_kv * of_forward;
  const auto by_copies = [&](const Operand& tensor, std::int64_t heads) {
    const auto at = cuda::rows_of(problem, tensor);
    return at.vectors && at.sequence[2] > 0 && (heads == 1 || at.head > 0) && (problem.batch == 1 || at.batch > 0);
  };
  return depth > 64 && of_forward <= of_decode && rows > 128 && 12 * tasks > machine &&
         attention_serves(problem, plan) && by_copies(problem.q, problem.heads_q) &&
         by_copies(problem.k, problem.heads_kv) && by_copies(problem.v, problem.heads_kv) &&
         by_copies(problem.out, problem.heads_q) &&
         (10 * tasks > 7 * machine || key_parts(problem, plan, depth == 128 ? 128 : 64, tasks).count > 1);
}

/// Queues the kernel that joins parts. early: it may begin before the kernel in front of it ends.
void join(DecodeArgs& args, const DecodeKernels& kernels, cudaStream_t stream, bool early) {
  int join = 3, rows_of_block = 1;
  while (join > 0 && args.joined > kJoinsBeside * rows_of_block) --join, rows_of_block *= 2;
  launch(kernels.joins[join], (args.joined + rows_of_block - 1) / rows_of_block, DecodeKernels::join_threads, 0, &args,
         stream, early);
}

}  // namespace

bool has_few_rows(const Problem& problem) { return problem.dimensions == 1 && rows_of(problem) <= most_rows; }

bool decode_may_serve(const Problem& problem, const ExecutionPlan& plan) {
  return !problem.chunks.portable && (has_few_rows(problem) || has_few_tasks(problem)) && plan.head_groups == 1 &&
         plan.query_grid.count() == 1 && plain_rows(problem, plan.query_grid) && plain_rows(problem, plan.key_grid);
}

bool decode_serves(const Problem& problem, const ExecutionPlan& plan) {
  if (!decode_may_serve(problem, plan)) return false;
  BulkDecodeArgs unused;
  return has_few_rows(problem) || (map_bulk_decode(problem, unused) && !forward_is_faster(problem, plan));
}

bool decode_needs_no_masks(const Problem& problem, const ExecutionPlan& plan, bool general) {
  return !general && sees_all(problem, plan) && (plan.masks_on_device || (plan.kept && plan.batch_groups == 1));
}

std::int64_t decode_workspace(const Problem& problem, const ExecutionPlan& plan) {
  std::int64_t most = 0;
  for (const auto& cut : {cut_of(problem, plan), cut_for_machine(problem, plan)})
    if (cut.parts > 1) most = std::max(most, result_bytes(problem, cut));
  return most + most / problem.d_v * 3;
}

void decode(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, bool general,
            CallMemory& memory, cudaStream_t stream) {
  BulkDecodeArgs args{};
  args.call = call, args.general = general;
  args.queries = static_cast<std::int32_t>(problem.queries());
  args.rows = static_cast<std::int32_t>(rows_of(problem));
  find_keys(problem, plan, args);
  auto kernels = kernels_of(problem, false);
  const bool whole = kernels.plain && has_whole_rows(kernels, args);
  // Calls whose entries could differ in a batch use the other kernel in every batch.
  const bool one_mask = args.queries == 1 && !may_differ(problem, plan);
  const bool in_a_row = !args.by_length && find_blocks(plan, one_mask, args);
  bool plain = whole && (args.by_length || (in_a_row && one_mask));
  args.masked = !plain, args.in_a_row = in_a_row && args.masked;
  // Hopper's kernels compute all 16-bit calls whose rows a tensor map can describe (no negative strides, for example).
  const auto cut_here = cut_for_machine(problem, plan);
  const bool bulk =
      whole && take_bulk_decode(problem, args, kernels, !problem.deterministic && is_alone(problem, plan, cut_here));
  plain = bulk || (plain && (element_size(problem.type) > 2 || !has_groups(problem.device)));
  if (plain && !bulk) kernels = kernels_of(problem, true);
  const auto cut = bulk && !problem.deterministic ? cut_here : cut_of(problem, plan);
  args.row_parts = (args.rows + kernels.rows - 1) / kernels.rows;
  args.parts = static_cast<std::int32_t>(cut.parts), args.part_blocks = static_cast<std::int32_t>(cut.part_blocks);
  args.call.value_parts = static_cast<std::int32_t>((problem.d_v + kernels.values - 1) / kernels.values);
  char* const workspace = memory.take(decode_workspace(problem, plan));
  const bool captured = capturing(stream);
  if (args.parts > 1) {
    args.results = workspace, args.statistics = args.results + result_bytes(problem, cut);
  }
  const auto tasks =
      double(problem.batch) * double(problem.heads_kv) * double(args.parts) * args.row_parts * args.call.value_parts;
  const auto rows = double(problem.batch) * double(problem.heads_q) * args.queries;
  check_tasks(std::max(tasks, rows));
  args.tasks = static_cast<std::int32_t>(tasks);
  args.joined = static_cast<std::int32_t>(rows);
  const auto* const parts = plain ? kernels.plain : kernels.parts;
  allow_shared_memory(parts, kernels.shared_bytes, problem.device.index);
  const auto& facts = facts_of(problem.device);
  const auto at_once = std::int64_t{facts.multiprocessors} * kernels.blocks;
  // Kernels compiled for older GPUs, which newer ones may run too, have no wait_for_kernel_before.
  const bool early = has_groups(problem.device);
  // Not in a CUDA graph: the node before it may not be a kernel.
  const auto launched = kernels.in_turns ? std::min<std::int64_t>(args.tasks, at_once) : args.tasks;
  launch(parts, launched, kernels.threads, kernels.shared_bytes, &args, stream, early && !captured);
  if (args.parts > 1) join(args, kernels, stream, early);
}

KeyParts key_parts(const Problem& problem, const ExecutionPlan& plan, std::int64_t step_keys, std::int64_t tasks,
                   bool few_visits) {
  const std::int64_t machine = facts_of(problem.device).multiprocessors;
  if (problem.deterministic || problem.dimensions != 1 || !plain_rows(problem, plan.query_grid) ||
      !plain_rows(problem, plan.key_grid) || plan.groups[0].program.has_documents || tasks == 0 || 2 * tasks > machine)
    return {};
  const std::int64_t blocks = plan.key_grid.count(), query_blocks = plan.query_grid.count();
  std::int64_t first = blocks, end = 0, visits = 0;  // of all masks; of the one that visits most
  for (const auto& group : plan.groups) {
    std::int64_t own = 0;
    for (const auto& run : group.keys_of_query_block.runs) {
      own += run.count;
      first = std::min<std::int64_t>(first, run.first), end = std::max<std::int64_t>(end, run.first + run.count);
    }
    visits = std::max(visits, own);
  }
  if (plan.masks_on_device || visits == 0) first = 0, end = blocks;   // lengths on the GPU may move what is visited
  if (visits == 0) visits = blocks * query_blocks;                    // not known
  if (2 * visits < (end - first) * query_blocks) return {};           // parts would have nothing to do
  const auto notes = problem.batch * problem.heads_q * query_blocks;  // bytes of each part
  const auto others = problem.memory_budget ? word_workspace(problem, plan, true) +
                                                  static_cast<std::int64_t>(device_bytes(problem, plan)) + 8192
                                            : 0;
  // Joining costs as much as five steps, and one for each 2 MiB of partial results. Tasks of one query block, for few
  // visits, have more multiprocessors at work, and take two thirds of the time.
  const std::int64_t step_blocks = step_keys / 64, steps = (end - first + step_blocks - 1) / step_blocks;
  KeyParts best;
  std::int64_t most_saved = 5;
  for (std::int64_t parts = 2; parts <= std::min<std::int64_t>(machine / tasks, kPartsJoined); ++parts) {
    const auto each = (steps + parts - 1) / parts, bytes = part_bytes(problem, {parts, 0, 0});
    const auto saved = (few_visits ? 2 * steps / 3 : steps) - each - bytes / (2 << 20);
    if (problem.memory_budget && bytes + parts * notes > *problem.memory_budget - others) break;
    if (saved > most_saved) most_saved = saved, best = {(steps + each - 1) / each, each * step_blocks, first};
  }
  return best;
}

std::int64_t part_rows(const Problem& problem, const KeyParts& parts) {
  return parts.count > 1 ? parts.count * problem.batch * problem.heads_q * problem.queries() : 0;
}

std::int64_t part_bytes(const Problem& problem, const KeyParts& parts) {
  return (part_rows(problem, parts) * (problem.d_v + 3) * 4 + 255) / 256 * 256;
}

void join_parts(const Problem& problem, const ForwardArgs& call, std::int32_t parts, float* results, float* statistics,
                cudaStream_t stream) {
  DecodeArgs args{};
  args.call = call, args.parts = parts;
  args.queries = static_cast<std::int32_t>(problem.queries()), args.rows = static_cast<std::int32_t>(rows_of(problem));
  args.results = reinterpret_cast<char*>(results), args.statistics = reinterpret_cast<char*>(statistics);
  args.joined = static_cast<std::int32_t>(problem.batch * problem.heads_q * problem.queries());
  join(args, kernels_of(problem, false), stream, true);
}

}  // namespace anyflash::cuda
