// A backward call on a GPU: its kernels, their arguments, the launches.
#include "cuda/portable/backward.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/device_plan.h"
#include "cuda/common/errors.h"
#include "cuda/common/memory_parts.h"
#include "cuda/hopper/backward.h"
#include "cuda/portable/backward_args.h"
#include "cuda/portable/backward_kernels.h"
#include "cuda/portable/launch.h"

namespace anyflash::cuda {
namespace {

BackwardKernels kernels_of(ElementType type, BackwardKind kind) {
  switch (type) {
    case ElementType::float16: return backward_kernels_float16(kind);
    case ElementType::bfloat16: return backward_kernels_bfloat16(kind);
    case ElementType::float32: return backward_kernels_float32(kind);
    default: return backward_kernels_float64(kind);
  }
}

BackwardKernels kernels_of(const Problem& problem) {
  const BackwardKind kind{padded_depth(problem), Tiling::small};
#if !defined(ANYFLASH_CUDA_SMALL_TILES)
  const auto& facts = facts_of(problem.device);
  const auto large = kernels_of(problem.type, {kind.depth, takes_tf32(problem) ? Tiling::tf32 : Tiling::large});
  if (facts.major >= 8 && large.gradients_bytes <= facts.shared_bytes) return large;
#endif
  return kernels_of(problem.type, kind);
}

/// Do Hopper's kernels compute the gradients?
bool by_groups(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& args) {
  return !problem.chunks.portable && group_backward_serves(problem, plan, args);
}

std::int64_t query_blocks(const Problem& problem, const ExecutionPlan& plan) {
  return problem.batch * problem.heads_q * plan.query_grid.count();
}

RowTerms terms_of(const Problem& problem, const ExecutionPlan& plan, MemoryParts& parts) {
  const auto blocks = query_blocks(problem, plan);
  const std::int64_t block_bytes = 64 * (problem.type == ElementType::float64 ? 8 : 4);
  const auto row_bytes = blocks * block_bytes;
  RowTerms terms{};
  terms.lse = parts.take<char>(row_bytes);
  terms.delta = parts.take<char>(row_bytes);
  terms.dlse = parts.take<char>(row_bytes);
  terms.rest = parts.take<char>(row_bytes + block_bytes);
  terms.live = parts.take<std::uint64_t>(blocks);
  terms.large_lse = parts.take<std::uint64_t>(blocks);
  terms.sink = parts.take<double>(problem.dsink.given() ? blocks : 0);
  return terms;
}

/// The number of thread blocks for the gradients of keys, of queries and of the bias.
struct Tasks {
  std::int64_t keys = 0, queries = 0, bias = 0;
};

Tasks tasks_of(const Problem& problem, const BackwardKernels& kernels, const BackwardArgs& args) {
  const std::int64_t parts = 64 / kernels.rows;
  const auto parts_of = [&](int side) { return args.sides[side].blocks * parts; };
  Tasks tasks;
  if (problem.dk.given() || problem.dv.given()) {
    const auto results = kernels.resident ? 1 : 1 + (problem.d_v + kernels.depth - 1) / kernels.depth;
    tasks.keys = problem.batch * problem.heads_kv * parts_of(1) * results;
  }
  if (problem.dq.given()) tasks.queries = problem.batch * problem.heads_q * parts_of(0);
  if (problem.dbias.given()) {
    const auto* size = problem.dbias.size;
    const bool whole_queries = size[2] == 1, whole_keys = size[3] == 1;
    const bool own_keys = whole_queries && !whole_keys;  // which of the bias's two axes is split into parts
    const auto own_parts = own_keys ? parts_of(1) : whole_queries ? 1 : parts_of(0);
    const std::int64_t other_blocks = own_keys || whole_keys ? 1 : args.sides[1].blocks;
    tasks.bias = size[0] * size[1] * own_parts * other_blocks;
  }
  return tasks;
}

BackwardSide side_of(const Problem& problem, const Grid& grid, std::int64_t heads, const Operand (&rows)[2],
                     const Operand (&gradients)[2]) {
  BackwardSide side{};
  for (int n = 0; n < 2; ++n)
    side.rows[n] = rows_of(problem, rows[n]), side.gradients[n] = rows_of(problem, gradients[n]);
  side.grid = grid;
  side.blocks = static_cast<std::int32_t>(grid.count());
  side.heads = static_cast<std::int32_t>(heads);
  side.plain = plain_rows(problem, grid);
  return side;
}

BackwardArgs args_of(const Problem& problem, const ExecutionPlan& plan) {
  BackwardArgs args{};
  args.sides[0] =
      side_of(problem, plan.query_grid, problem.heads_q, {problem.q, problem.dout}, {problem.dq, Operand()});
  args.sides[1] = side_of(problem, plan.key_grid, problem.heads_kv, {problem.k, problem.v}, {problem.dk, problem.dv});
  args.out = rows_of(problem, problem.out);
  args.lse = numbers_of(problem.lse), args.dlse = numbers_of(problem.dlse);
  args.bias = numbers_of(problem.bias), args.alibi = numbers_of(problem.alibi), args.sink = numbers_of(problem.sink);
  args.dbias = numbers_of(problem.dbias), args.dsink = numbers_of(problem.dsink);
  for (int i = 0; i < 4; ++i) args.bias_size[i] = static_cast<std::int32_t>(problem.dbias.size[i]);
  args.batch_groups = static_cast<std::int32_t>(plan.batch_groups);
  args.head_groups = static_cast<std::int32_t>(plan.head_groups);
  args.batch = static_cast<std::int32_t>(problem.batch);
  args.group_heads = static_cast<std::int32_t>(problem.heads_q / problem.heads_kv);
  args.dimensions = problem.dimensions;
  args.channels[0] = static_cast<std::int32_t>(problem.d_qk);
  args.channels[1] = static_cast<std::int32_t>(problem.d_v);
  args.general = problem.softcap > 0 || problem.bias.given() || problem.alibi.given();
  args.scale = problem.scale, args.softcap = problem.softcap;
  return args;
}

}  // namespace

// backward_sink.cu
void sum_sinks(const BackwardArgs& args, cudaStream_t stream);
void load_sum_sinks(int device);

TileMenu backward_menu(const Problem&) {
  TileMenu menu;
  menu.key_rows = 64;
  menu.tile_cost = 1024;
  menu.query_rows = {64};
  return menu;
}

std::int64_t backward_workspace(const Problem& problem, const ExecutionPlan& plan) {
  MemoryParts parts(nullptr);
  terms_of(problem, plan, parts);
  if (by_groups(problem, plan, args_of(problem, plan))) parts.take<char>(group_backward_workspace(problem, plan));
  return parts.bytes();
}

void backward(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  const DeviceScope scope(problem.device.index);
  const auto stream = static_cast<cudaStream_t>(problem.stream);
  check_pointers(problem);
  const auto kernels = kernels_of(problem);
  auto args = args_of(problem, plan);
  const auto tasks = tasks_of(problem, kernels, args);
  check_tasks(double(tasks.keys) + double(tasks.queries) + double(tasks.bias));
  const auto blocks = query_blocks(problem, plan);
  check_tasks(double(blocks));
  allow_shared_memory(kernels.terms, kernels.terms_bytes, problem.device.index);
  allow_shared_memory(kernels.gradients, kernels.gradients_bytes, problem.device.index);
  allow_shared_memory(kernels.lse_remainders, kernels.gradients_bytes, problem.device.index);
  if (problem.dsink.given()) load_sum_sinks(problem.device.index);

  CallMemory memory(workspace, stream);
  DevicePlan masks(problem, plan, memory, stream);
  args.groups = masks.groups();
  MemoryParts parts(memory.take(backward_workspace(problem, plan)));
  args.terms = terms_of(problem, plan, parts);
  const auto find_terms = [&](BackwardArgs& of) {
    launch(kernels.terms, blocks, kernels.threads, kernels.terms_bytes, &of, stream);
  };
  const auto find_lse_remainders = [&](BackwardArgs& of) {
    launch(kernels.lse_remainders, launched_blocks(blocks, true, problem.device), kernels.threads,
           kernels.gradients_bytes, &of, stream);
  };
  const auto make = [&](std::int64_t keys, std::int64_t queries, std::int64_t bias, const std::int32_t* only_if) {
    args.key_tasks = keys, args.query_tasks = queries, args.tasks = keys + queries + bias, args.only_if = only_if;
    if (args.tasks > 0)
      launch(kernels.gradients, launched_blocks(args.tasks, only_if != nullptr, problem.device), kernels.threads,
             kernels.gradients_bytes, &args, stream);
  };
  GroupBackwardResult groups{};
  if (by_groups(problem, plan, args))
    groups = group_backward(problem, plan, args, masks, parts.take<char>(group_backward_workspace(problem, plan)),
                            {find_terms, find_lse_remainders}, stream);
  if (!groups.made) {
    find_terms(args);
    find_lse_remainders(args);
    make(tasks.keys, tasks.queries, tasks.bias, nullptr);
  } else {
    if (!groups.made_bias) make(0, 0, tasks.bias, nullptr);
    make(tasks.keys, tasks.queries, groups.made_bias ? tasks.bias : 0, groups.remake_if);
  }
  if (problem.dsink.given()) sum_sinks(args, stream);
}

}  // namespace anyflash::cuda
