// A forward call on a GPU: its kernel, its arguments, the launch.
#include "cuda/portable/forward.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "cuda/common/device.h"
#include "cuda/common/device_plan.h"
#include "cuda/common/errors.h"
#include "cuda/hopper/forward.h"
#include "cuda/portable/decode.h"
#include "cuda/portable/forward_args.h"
#include "cuda/portable/forward_kernels.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/tuning.h"
#include "problem/tensor.h"

namespace anyflash::cuda {
namespace {

ForwardKernel kernel_of(ElementType type, ForwardKind kind) {
  switch (type) {
    case ElementType::float16: return forward_kernel_float16(kind);
    case ElementType::bfloat16: return forward_kernel_bfloat16(kind);
    case ElementType::float32: return forward_kernel_float32(kind);
    default: return forward_kernel_float64(kind);
  }
}

constexpr double log2_e = 1.4426950408889634;

ForwardKind kind_of(const Problem& problem) {
  ForwardKind kind;
  kind.depth = padded_depth(problem);
  kind.general = is_general(problem);
#if defined(ANYFLASH_CUDA_SMALL_TILES)
  kind.tiling = Tiling::small;
#else
  const auto& facts = facts_of(problem.device);
  const auto large = takes_tf32(problem) ? Tiling::tf32 : Tiling::large;
  const auto fits = [&] {
    return facts.major >= 8 && kernel_of(problem.type, {kind.depth, large, true}).shared_bytes <= facts.shared_bytes;
  };
  kind.tiling = has_groups(problem.device) ? Tiling::group : fits() ? large : Tiling::small;
#endif
  kind.general |= kind.tiling == Tiling::small;
  return kind;
}

/// The page table in device memory, if there is one. It is copied there if it is on the CPU.
void bring_pages(const Problem& problem, ForwardArgs& args, CallMemory& memory, cudaStream_t stream) {
  const auto& pages = problem.pages;
  if (pages.page_size == 0) return;
  if (problem.tables_on_device) {
    args.pages = {pages.table, pages.table_batch, pages.table_page, static_cast<std::int32_t>(pages.page_size),
                  static_cast<std::int32_t>(pages.pages)};
    return;
  }
  if (capturing(stream))
    throw Error(Error::Kind::unsupported, "page_table: in a captured stream, expected a call outside of captures");
  const auto entry_pages = (problem.keys() + pages.page_size - 1) / pages.page_size;
  std::vector<std::int32_t> table(problem.batch * entry_pages, 0);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    const auto used = (integer_at(problem.key_lengths, b) + pages.page_size - 1) / pages.page_size;
    for (std::int64_t i = 0; i < used; ++i)
      table[b * entry_pages + i] = pages.table[b * pages.table_batch + i * pages.table_page];
  }
  const auto bytes = table.size() * sizeof(table[0]);
  char* const brought = memory.take(static_cast<std::int64_t>(bytes));
  bring(
      brought, bytes, [&](char* to) { std::memcpy(to, table.data(), bytes); }, problem.device.index, stream,
      "bringing the page table to the device");
  args.pages = {reinterpret_cast<const std::int32_t*>(brought), entry_pages, 1,
                static_cast<std::int32_t>(pages.page_size), static_cast<std::int32_t>(pages.pages)};
}

ForwardArgs args_of(const Problem& problem, const ExecutionPlan& plan, const ForwardKernel& kernel, bool general) {
  ForwardArgs args{};
  args.q = rows_of(problem, problem.q), args.k = rows_of(problem, problem.k), args.v = rows_of(problem, problem.v);
  args.out = rows_of(problem, problem.out);
  args.lse = numbers_of(problem.lse), args.row_sum = numbers_of(problem.row_sum),
  args.row_max = numbers_of(problem.row_max);
  args.bias = numbers_of(problem.bias), args.alibi = numbers_of(problem.alibi), args.sink = numbers_of(problem.sink);
  args.query_grid = plan.query_grid, args.key_grid = plan.key_grid;
  args.batch_groups = static_cast<std::int32_t>(plan.batch_groups);
  args.head_groups = static_cast<std::int32_t>(plan.head_groups);
  args.heads = static_cast<std::int32_t>(problem.heads_q);
  args.group_heads = static_cast<std::int32_t>(problem.heads_q / problem.heads_kv);
  args.dimensions = problem.dimensions;
  args.d_qk = static_cast<std::int32_t>(problem.d_qk), args.d_v = static_cast<std::int32_t>(problem.d_v);
  args.query_blocks = static_cast<std::int32_t>(plan.query_grid.count());
  args.block_parts = static_cast<std::int32_t>(rules::volume(plan.query_grid.extent) / kernel.rows);
  args.value_parts = static_cast<std::int32_t>((problem.d_v + kernel.values - 1) / kernel.values);
  args.query_rows = plain_rows(problem, plan.query_grid), args.key_rows = plain_rows(problem, plan.key_grid);
  args.paged = problem.pages.page_size > 0;
  const auto numbers = static_cast<std::int64_t>(16 / element_size(problem.type));
  args.whole_channels = problem.d_qk % numbers == 0 && problem.d_v % numbers == 0;
  args.plain_keys = args.key_rows && !args.paged && args.whole_channels && args.k.vectors && args.v.vectors;
  args.scale = problem.scale, args.softcap = problem.softcap;
  // Products are scaled as they become exponents, in powers of 2 for 16-bit types. General scores are already complete.
  args.unit = (general ? 1 : problem.scale) * (element_size(problem.type) == 2 ? log2_e : 1);
  // Finite, whatever the scale: otherwise no number would be above -inf, a row's first shift.
  args.lag = std::min(kShiftLag / args.unit, std::numeric_limits<double>::max());
  args.unit32 = static_cast<float>(args.unit);
  args.lag32 = static_cast<float>(std::min(args.lag, double{std::numeric_limits<float>::max()}));
  return args;
}

}  // namespace

TileMenu forward_menu(const Problem& problem) {
  TileMenu menu;
  menu.key_rows = 64;
  menu.tile_cost = 1024;
  menu.query_rows = {std::max(kernel_of(problem.type, kind_of(problem)).rows, 64)};
  return menu;
}

std::int64_t forward_workspace(const Problem& problem, const ExecutionPlan& plan) {
  return problem.chunks.portable ? 0 : group_forward_workspace(problem, plan);
}

void forward(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  const DeviceScope scope(problem.device.index);
  const auto stream = static_cast<cudaStream_t>(problem.stream);
  check_pointers(problem);
  const bool few = decode_serves(problem, plan);
  const auto kind = kind_of(problem);
  const auto kernel = kernel_of(problem.type, kind);
  const bool general = few ? is_general(problem) : kind.general;
  auto args = args_of(problem, plan, kernel, general);
  const auto tasks =
      double(problem.batch) * double(problem.heads_q) * double(args.query_blocks) * args.block_parts * args.value_parts;
  check_tasks(tasks);
  CallMemory memory(workspace, stream);
  bring_pages(problem, args, memory, stream);
  if (few && decode_needs_no_masks(problem, plan, general)) return decode(problem, plan, args, general, memory, stream);
  DevicePlan masks(problem, plan, memory, stream);
  args.groups = masks.groups();
  if (few) return decode(problem, plan, args, general, memory, stream);
  allow_shared_memory(kernel.function, kernel.shared_bytes, problem.device.index);  // before anything is written
  char* const own = memory.take(forward_workspace(problem, plan));
  const auto again =
      problem.chunks.portable ? Again() : group_forward(problem, plan, args, general, masks, own, stream);
  args.only_if = again.any, args.only_blocks = again.blocks, args.notes = again.notes;
  args.tasks = static_cast<std::int32_t>(tasks);
  launch(kernel.function, launched_blocks(args.tasks, args.only_if != nullptr, problem.device), kernel.threads,
         kernel.shared_bytes, &args, stream, args.only_if != nullptr);
}

}  // namespace anyflash::cuda
