// Parts of a call: pointers, sizes and masks of some batch entries and heads.
#include "plan/parts.h"

#include <algorithm>

#include "plan/facts.h"

namespace anyflash::planning {
namespace {

/// Batch entries and key/value heads of a part of a call.
struct Part {
  std::int64_t first_b, b, first_g, g;
};

/// Moves all that goes by batch entry or head to a part's first.
Problem problem_of(const Problem& whole, const Part& part) {
  Problem problem = whole;
  const auto heads = whole.heads_kv ? whole.heads_q / whole.heads_kv : 1, first_h = part.first_g * heads;
  problem.chunks = {.portable = whole.chunks.portable};
  problem.batch = part.b, problem.heads_kv = part.g, problem.heads_q = part.g * heads;
  const auto size = static_cast<std::int64_t>(element_size(whole.type)), wide = std::int64_t{size == 8 ? 8 : 4};
  const auto move = [&](auto& one, std::int64_t first, std::int64_t bytes) {
    if (one.given()) one.data += (part.first_b * one.batch + first * one.head) * bytes;
  };
  for (auto* one : {&problem.q, &problem.out, &problem.dout, &problem.dq}) move(*one, first_h, size);
  for (auto* one : {&problem.dk, &problem.dv}) move(*one, part.first_g, size);
  for (auto* one : {&problem.k, &problem.v}) {
    if (whole.pages.page_size > 0) one->data += part.first_g * one->head * size;  // batch is the step from page to page
    else move(*one, part.first_g, size);
  }
  if (whole.pages.table) problem.pages.table += part.first_b * whole.pages.table_batch;
  for (auto* one : {&problem.lse, &problem.row_sum, &problem.row_max, &problem.dlse}) move(*one, first_h, wide);
  for (auto* one : {&problem.alibi, &problem.sink, &problem.dsink})
    move(*one, first_h, static_cast<std::int64_t>(element_size(one->type)));
  for (auto* one : {&problem.bias, &problem.dbias}) {
    if (!one->given()) continue;
    const auto bytes = static_cast<std::int64_t>(element_size(one->type));
    one->data += (part.first_b * one->stride[0] + first_h * one->stride[1]) * bytes;
    if (one->size[0] > 1) one->size[0] = part.b;
    if (one->size[1] > 1) one->size[1] = problem.heads_q;
  }
  if (auto& lengths = problem.key_lengths; lengths.given()) {
    const auto step = lengths.strides[0] * static_cast<std::int64_t>(element_size(lengths.type));
    lengths.data = static_cast<char*>(lengths.data) + part.first_b * step;
    lengths.shape[0] = part.b;
  }
  return problem;
}

/// The mask of the first batch entry and head of a part, in a plan whose masks are found on the GPU. Its program names
/// the tables in the GPU's memory, which nobody reads here.
MaskGroup group_on_device(const ExecutionPlan& whole, const Problem& problem, std::int64_t b, std::int64_t h) {
  auto group = whole.groups[0];
  rules::Tables tables;  // none: the GPU makes those of documents
  group.program = rules::compile(problem.rule, shapes_of(problem), b, h, tables, -1, true);
  return group;
}

/// The plan with the masks of a part. It does not outlive the call.
void fill_plan(const ExecutionPlan& whole, const Problem& of_whole, const Problem& problem, const Part& part,
               ExecutionPlan& plan) {
  const auto heads = problem.heads_q / std::max<std::int64_t>(part.g, 1), first_h = part.first_g * heads;
  plan.query_grid = whole.query_grid, plan.key_grid = whole.key_grid, plan.masks_on_device = whole.masks_on_device;
  plan.batch_groups = whole.batch_groups > 1 ? part.b : 1;
  plan.head_groups = whole.head_groups > 1 ? problem.heads_q : 1;
  if (whole.masks_on_device) {
    plan.groups.push_back(group_on_device(whole, of_whole, whole.batch_groups > 1 ? part.first_b : 0,
                                          whole.head_groups > 1 ? first_h : 0));
  } else {
    for (std::int64_t b = 0; b < plan.batch_groups; ++b)
      for (std::int64_t h = 0; h < plan.head_groups; ++h)
        plan.groups.push_back(whole.group(part.first_b + b, first_h + h));
  }
  plan.tables = whole.tables, plan.threads = whole.threads;
  plan.most_keys = whole.most_keys, plan.most_queries = whole.most_queries, plan.tiles = whole.tiles;
}

}  // namespace

void for_each_part(const Problem& problem, const ExecutionPlan& plan,
                   const std::function<void(const Problem&, const ExecutionPlan&)>& run) {
  const auto at_once = problem.chunks.groups;
  if (at_once <= 0) return run(problem, plan);
  const auto& dbias = problem.dbias;
  const bool by_batch = !problem.dsink.given() && (!dbias.given() || dbias.size[0] > 1 || problem.batch == 1);
  const bool by_heads = (!dbias.given() || dbias.size[1] > 1 || problem.heads_q == 1) && at_once < problem.heads_kv;
  const auto b = by_batch ? std::clamp<std::int64_t>(at_once / problem.heads_kv, 1, problem.batch) : problem.batch;
  const auto g = by_heads ? at_once : problem.heads_kv;
  const bool same_mask = plan.batch_groups == 1 && plan.head_groups == 1;
  for (std::int64_t first_b = 0; first_b < problem.batch; first_b += b)
    for (std::int64_t first_g = 0; first_g < problem.heads_kv; first_g += g) {
      const Part part{first_b, std::min(b, problem.batch - first_b), first_g, std::min(g, problem.heads_kv - first_g)};
      const auto own = problem_of(problem, part);
      if (same_mask) {
        run(own, plan);
        continue;
      }
      ExecutionPlan masks;
      fill_plan(plan, problem, own, part, masks);
      run(own, masks);
    }
}

}  // namespace anyflash::planning
