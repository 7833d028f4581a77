#include "cuda/common/device_masks.h"

#include <algorithm>
#include <bit>

#include "cuda/common/device.h"
#include "cuda/common/memory_parts.h"
#include "plan/facts.h"
#include "problem/tensor.h"
#include "rules/compile.h"

namespace anyflash::cuda {
namespace {

constexpr std::int64_t run_bytes = std::int64_t{64} << 20, fewest_runs = 64;
// Partial tiles per block, on average; where ids may come in any order all tiles, as far as their words fit in so many
// bytes.
constexpr std::int64_t partial_of_a_block = 8, bytes_of_ids = std::int64_t{64} << 20;

/// The strides of the atoms' tables from one batch entry (head) to the next. The call may be a part of one: its first
/// batch entry and head are not always the tables' first.
void find_strides(const Problem& problem, std::int64_t b, std::int64_t h, std::int64_t (&strides)[rules::max_atoms]) {
  rules::Tables tables;
  const auto shapes = planning::shapes_of(problem);
  const auto first = rules::compile(problem.rule, shapes, 0, 0, tables, -1, true);
  const auto next = rules::compile(problem.rule, shapes, b, h, tables, -1, true);
  for (int i = 0; i < first.atom_count; ++i) strides[i] = next.atoms[i].data - first.atoms[i].data;
}

/// Ids: the first row is the program's, which may not be the tables' first.
void take_ids(const Problem& problem, const ExecutionPlan& plan, const rules::DocumentTables& tables,
              DeviceMaskArgs& args, MemoryParts& memory) {
  auto& ids = args.ids;
  const std::int64_t entries[] = {problem.queries(), problem.keys()};
  ids.rows = 1;
  for (int side = 0; side < 2; ++side) {
    const auto& table = side == 0 ? tables.q : tables.k;
    const auto size = static_cast<std::int64_t>(element_size(table.type));
    ids.of[side] = {static_cast<const char*>(args.program.document_ids[side]), table.type == ElementType::int64,
                    entries[side], table.strides[table.rank - 1]};
    if (table.rank == 2 && table.shape[0] > 1) ids.batch_stride[side] = table.strides[0] * size;
    if (table.rank == 2 && table.shape[0] > 1) ids.rows = static_cast<std::int32_t>(plan.batch_groups);
    ids.entries[side] = static_cast<std::int32_t>(entries[side]);
  }
  const auto &q = ids.of[0], &k = ids.of[1];
  ids.same = q.data == k.data && q.wide == k.wide && q.size == k.size && q.stride == k.stride &&
             ids.batch_stride[0] == ids.batch_stride[1];
  if (entries[0] + entries[1] > std::int64_t{1} << 29)
    throw Error(Error::Kind::unsupported, "rule documents: more than 2^29 ids on a GPU");
  args.same_documents = ids.same;
  ids.all = ids.entries[0] + (ids.same ? 0 : ids.entries[1]);
  ids.slots = std::bit_ceil(static_cast<std::uint32_t>(2 * ids.all));
  const auto zero = memory.bytes();
  const std::int64_t rows = ids.rows;
  ids.counts = memory.take<std::int32_t>(rows * 2), ids.apart = memory.take<std::int32_t>(rows);
  ids.slot_segment = memory.take<std::int32_t>(rows * ids.slots);
  ids.closest = memory.take<std::int32_t>(rows * ids.slots);
  for (int side = 0; side < 2; ++side)
    ids.sizes[side] = side == 1 && ids.same ? ids.sizes[0] : memory.take<std::int32_t>(rows * ids.all);
  ids.zero_bytes = memory.bytes() - zero;
  ids.slot_of = memory.take<std::int32_t>(rows * ids.all);
  for (int side = 0; side < 2; ++side) {
    if (side == 1 && ids.same) {
      args.documents[1] = args.documents[0], ids.trees[1] = ids.trees[0];
      continue;
    }
    const auto all = rows * entries[side];
    args.documents[side] = {memory.take<std::int32_t>(all), memory.take<std::int32_t>(all),
                            memory.take<rules::Segment>(all)};
    ids.trees[side] = memory.take<rules::DocumentRange>(2 * all);
  }
  args.axes = memory.take<rules::Axis>(rows * ids.all);
}

/// The tables of ids or cumulative lengths, the call's or the rule's.
void take_documents(const Problem& problem, const ExecutionPlan& plan, DeviceMaskArgs& args, MemoryParts& memory) {
  const auto tables = rules::document_tables(rules::with_lengths(problem.rule, planning::shapes_of(problem)));
  if (tables.ids) return take_ids(problem, plan, tables, args, memory);
  const auto &q = tables.q, &k = tables.k;
  args.cu_seqlens[0] = integers_of(q), args.cu_seqlens[1] = integers_of(k);
  args.same_documents =
      q.data == k.data && q.type == k.type && q.strides[0] == k.strides[0] && problem.queries() == problem.keys();
  const auto segments = q.shape[0] - 1 + 2;  // two more segments: entries behind the last document, on either side
  const std::int64_t entries[] = {problem.queries(), problem.keys()};
  for (int side = 0; side < 2; ++side) {
    auto& to = args.documents[side];
    to = {memory.take<std::int32_t>(entries[side]), nullptr, memory.take<rules::Segment>(segments)};
    to.document_of = to.segment_of;  // a document is one segment
  }
  args.axes = memory.take<rules::Axis>(segments);
  const auto view = [&](int side) {
    const auto& from = args.documents[side];
    return rules::DocumentSide{from.segment_of, from.document_of, from.segments, nullptr,
                               static_cast<std::int32_t>(segments)};
  };
  args.program.documents = {view(0), view(1), args.axes};
}

/// Causal is the order of places where both sides have the same documents.
RaggedMask ragged_mask(const DeviceMaskArgs& args) {
  const auto& program = args.program;
  bool only = program.has_documents && program.conjunction && program.documents_required && program.dimensions == 1 &&
              !args.key_lengths.data;
  for (const auto& grid : args.grids) only &= grid.step[2] == 1;
  bool causal = false;
  for (int i = 0; i < program.atom_count; ++i) {
    const auto& atom = program.atoms[i];
    causal |= atom.kind == rules::AtomKind::causal;
    only &= !atom.negated && (atom.kind == rules::AtomKind::documents || atom.kind == rules::AtomKind::causal);
  }
  if (!only || (causal && !args.same_documents)) return {};
  RaggedMask mask{causal ? RaggedMask::Rule::causal : RaggedMask::Rule::full, {}, {}, args.ids.apart};
  const auto& ids = args.ids;
  if (ids.rows == 0) mask.q = program.documents.q, mask.k = program.documents.k;
  const auto& found = args.documents[0];
  if (ids.rows == 1 && ids.same)
    mask.q = mask.k = {found.segment_of, found.segment_of, found.segments, nullptr, ids.all};
  return mask;
}

}  // namespace

Integers integers_of(const TensorView& view) {
  if (!view.given()) return {nullptr, false, 0, 0};
  return {static_cast<const char*>(view.data), view.type == ElementType::int64, view.shape[0], view.strides[0]};
}

std::int64_t device_mask_tiles(const Problem& problem, const ExecutionPlan& plan) {
  if (!plan.masks_on_device || element_size(problem.type) != 2 || !has_groups(problem.device)) return 0;
  const auto& program = plan.groups[0].program;
  const bool tables = std::any_of(program.atoms, program.atoms + program.atom_count,
                                  [](const rules::Atom& atom) { return atom.data != nullptr; });
  if (tables) return 0;
  const auto groups = plan.batch_groups * plan.head_groups;
  const auto query_blocks = std::int64_t{plan.query_grid.count()}, key_blocks = std::int64_t{plan.key_grid.count()};
  const auto bytes = 8 * std::max(rules::volume(plan.query_grid.extent), rules::volume(plan.key_grid.extent));
  const auto fitting = std::min(groups * query_blocks * key_blocks, bytes_of_ids / bytes);
  const auto of_ids = program.document_ids[0] ? fitting : 0;
  return std::max(groups * partial_of_a_block * (query_blocks + key_blocks), of_ids);
}

DeviceMaskArgs device_mask_args(const Problem& problem, const ExecutionPlan& plan, char* memory, std::int64_t& bytes) {
  DeviceMaskArgs args{};
  MemoryParts taken(memory);
  args.program = plan.groups[0].program;
  if (plan.batch_groups > 1) find_strides(problem, 1, 0, args.batch_stride);
  if (plan.head_groups > 1) find_strides(problem, 0, 1, args.head_stride);
  args.key_lengths = integers_of(problem.key_lengths);
  args.grids[0] = plan.query_grid, args.grids[1] = plan.key_grid;
  args.align = problem.align;
  args.backward = problem.direction == Direction::backward;
  args.batch_groups = static_cast<std::int32_t>(plan.batch_groups);
  args.head_groups = static_cast<std::int32_t>(plan.head_groups);
  const auto groups = plan.batch_groups * plan.head_groups;
  const auto query_blocks = plan.query_grid.count(), key_blocks = plan.key_grid.count();
  args.blocks[0] = static_cast<std::int32_t>(query_blocks);
  args.blocks[1] = args.backward ? static_cast<std::int32_t>(key_blocks) : 0;
  const auto all = std::max<std::int64_t>(groups * (args.blocks[0] + std::int64_t{args.blocks[1]}), 1);
  const auto fitting = run_bytes / static_cast<std::int64_t>(sizeof(DeviceRun)) / all;
  args.most_runs =
      static_cast<std::int32_t>(std::min(std::max(fitting, fewest_runs), std::max(query_blocks, key_blocks)));
  args.groups = taken.take<DeviceGroup>(groups);
  args.programs = taken.take<rules::Program>(groups);
  for (int side = 0; side < 2; ++side) {
    args.starts[side] = taken.take<std::int64_t>(args.blocks[side] + 1);
    args.runs[side] = taken.take<DeviceRun>(groups * args.blocks[side] * args.most_runs);
  }
  if (args.program.has_documents) take_documents(problem, plan, args, taken);
  args.ragged = ragged_mask(args);
  if (device_mask_tiles(problem, plan) > 0) args.numbered = taken.take<unsigned long long>(2);
  bytes = taken.bytes();
  return args;
}

}  // namespace anyflash::cuda
