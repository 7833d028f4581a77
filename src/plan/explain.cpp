// Figures of a rule and its plan, and the pattern by definition.
#include <algorithm>
#include <bit>

#include <anyflash/explain.h>

#include "backends.h"
#include "plan/explained.h"
#include "plan/facts.h"
#include "rules/sees.h"
#include "rules/words.h"

namespace anyflash {
namespace planning {
namespace {

TensorView shape_view(ElementType type, std::int64_t batch, std::int64_t heads, const SequenceShape& sequence,
                      std::int64_t channels, const char* name) {
  if (sequence.empty() || sequence.size() > 3) {
    throw Error(Error::Kind::value, std::string(name) + ": a sequence of " + std::to_string(sequence.size()) +
                                        " dimensions, expected 1 to 3");
  }
  TensorView view;
  view.type = type;
  view.rank = 0;
  const auto append = [&](std::int64_t size) { view.shape[view.rank++] = size; };
  append(batch);
  append(heads);
  for (const auto size : sequence) append(size);
  append(channels);
  view.set_row_major_strides();
  return view;
}

/// Blocks with at least one entry, by their place among those.
std::vector<std::int32_t> blocks_with_entries(const Grid& grid) {
  std::vector<std::int32_t> found;
  for (std::int64_t block = 0; block < grid.count(); ++block) {
    if (rules::inside(grid.box(std::int32_t(block)).origin, grid.size)) found.push_back(std::int32_t(block));
  }
  return found;
}

std::int64_t rows_inside(const Box& block, Int3 size) {
  std::int64_t rows = 1;
  for (int i = 0; i < 3; ++i) {
    const auto left = (std::int64_t(size[i]) - block.origin[i] + block.step[i] - 1) / block.step[i];
    rows *= std::clamp<std::int64_t>(left, 0, block.extent[i]);
  }
  return rows;
}

/// Visible pairs of a tile, by its words.
std::int64_t visible_in_tile(const rules::Program& program, const Box& queries, Int3 q_size, const Box& keys,
                             Int3 k_size) {
  std::int64_t visible = 0;
  const int rows = int(rules::volume(queries.extent)), cells = cells_of(keys);
  for (int c = 0; c < cells; ++c) {
    const auto cell = cell_of(keys, c);
    if (!rules::inside(cell.origin, k_size)) continue;
    rules::WordsOfKeys words(program, cell);
    for (int row = 0; row < rows; ++row) {
      const auto query = queries.entry(row);
      if (rules::inside(query, q_size)) visible += std::popcount(words(query));
    }
  }
  return visible;
}

struct Counts {
  std::int64_t visible = 0, partial = 0, full = 0;
};

Counts count(const ExecutionPlan& plan) {
  const auto& list = plan.groups[0].keys_of_query_block;
  const auto& program = plan.groups[0].program;
  const auto key_rows = rules::volume(plan.key_grid.extent);
  std::int64_t visible = 0, partial = 0, full = 0;
#pragma omp parallel for schedule(dynamic, 16) reduction(+ : visible, partial, full) num_threads(plan.threads)
  for (std::int64_t block = 0; block < plan.query_grid.count(); ++block) {
    const auto queries = plan.query_grid.box(std::int32_t(block));
    const auto rows = rows_inside(queries, plan.query_grid.size);
    for (auto r = list.start[block]; r < list.start[block + 1]; ++r) {
      const auto& run = list.runs[r];
      if (run.kind == TileClass::full) {
        full += run.count;
        visible += rows * run.count * key_rows;
        continue;
      }
      partial += run.count;
      for (std::int32_t k = run.first; k < run.first + run.count; ++k) {
        visible += visible_in_tile(program, queries, plan.query_grid.size, plan.key_grid.box(k), plan.key_grid.size);
      }
    }
  }
  return {visible, partial, full};
}

std::vector<std::uint8_t> classes_of(const ExecutionPlan& plan, const std::vector<std::int32_t>& query_blocks,
                                     const std::vector<std::int32_t>& key_blocks) {
  std::vector<std::uint8_t> classes(query_blocks.size() * key_blocks.size());
  const auto& list = plan.groups[0].keys_of_query_block;
  for (std::size_t q = 0; q < query_blocks.size(); ++q) {
    for (auto r = list.start[query_blocks[q]]; r < list.start[query_blocks[q] + 1]; ++r) {
      const auto& run = list.runs[r];
      auto at = std::lower_bound(key_blocks.begin(), key_blocks.end(), run.first);
      for (; at != key_blocks.end() && *at < run.first + run.count; ++at) {
        classes[q * key_blocks.size() + (at - key_blocks.begin())] = std::uint8_t(run.kind);
      }
    }
  }
  return classes;
}

}  // namespace

Problem explained_problem(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                          const ExplainOptions& options) {
  if (!q_shape.empty() && q_shape.size() <= 3 && k_shape.size() != q_shape.size()) {
    throw Error(Error::Kind::value, "key: sequence dimensions " + std::to_string(k_shape.size()) + ", expected " +
                                        std::to_string(q_shape.size()) + " as in query");
  }
  const auto axes = table_axes(rule);
  Options call;
  call.rule = rule;
  call.align = options.align;
  const auto q = shape_view(options.type, axes.batch, axes.heads, q_shape, options.d_qk, "query");
  const auto k = shape_view(options.type, axes.batch, axes.heads, k_shape, options.d_qk, "key");
  const auto v = shape_view(options.type, axes.batch, axes.heads, k_shape, options.d_v, "value");
  auto problem = shape_problem(q, k, v, call, options.backward ? Direction::backward : Direction::forward);
  rules::check(rule, shapes_of(problem));
  return problem;
}

}  // namespace planning

Explanation explain(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                    const ExplainOptions& options) {
  const auto problem = planning::explained_problem(rule, q_shape, k_shape, options);
  const auto plan = make_plan(problem, backend_of(problem.device).menu(problem));
  const auto query_blocks = planning::blocks_with_entries(plan->query_grid);
  const auto key_blocks = planning::blocks_with_entries(plan->key_grid);
  const auto counts = planning::count(*plan);

  Explanation result;
  result.queries = problem.queries();
  result.keys = problem.keys();
  result.visible_pairs = counts.visible;
  result.tiles_partial = counts.partial;
  result.tiles_full = counts.full;
  result.query_blocks = std::int64_t(query_blocks.size());
  result.key_blocks = std::int64_t(key_blocks.size());
  result.tiles_skipped = result.query_blocks * result.key_blocks - counts.partial - counts.full;
  result.visited_pairs =
      (counts.partial + counts.full) * rules::volume(plan->query_grid.extent) * rules::volume(plan->key_grid.extent);
  if (counts.visible > 0) result.visited_per_visible = double(result.visited_pairs) / double(counts.visible);
  for (int i = 0; i < 3; ++i) {
    result.query_block[i] = plan->query_grid.extent[i];
    result.query_step[i] = plan->query_grid.step[i];
    result.key_block[i] = plan->key_grid.extent[i];
    result.key_step[i] = plan->key_grid.step[i];
  }
  const double d_qk = double(options.d_qk), d_v = double(options.d_v), visible = double(counts.visible);
  const double queries = double(result.queries), keys = double(result.keys);
  result.forward_flops = 2 * (d_qk + d_v) * visible;
  result.backward_flops = (6 * d_qk + 4 * d_v) * visible;  // S, dP and dV; dQ and dK
  result.bytes = double(element_size(options.type)) * (queries + keys) * (d_qk + d_v) +
                 queries * (options.type == ElementType::float64 ? 8 : 4);
  result.dense_mask_bytes = queries * keys;
  result.threads = threads_of(problem, *plan);
  result.workspace_bytes = workspace_bytes(problem, *plan);
  if (double(result.query_blocks) * double(result.key_blocks) <= double(1 << 24)) {
    result.tile_classes = planning::classes_of(*plan, query_blocks, key_blocks);
  }
  return result;
}

std::vector<std::uint8_t> pattern(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                                  Align align) {
  ExplainOptions options;
  options.align = align;
  const auto problem = planning::explained_problem(rule, q_shape, k_shape, options);
  const auto queries = problem.queries(), keys = problem.keys();
  if (double(queries) * double(keys) > double(1 << 28)) {
    throw Error(Error::Kind::value, "pattern: " + std::to_string(queries) + " queries x " + std::to_string(keys) +
                                        " keys, expected at most 2^28 pairs");
  }
  std::vector<std::uint8_t> seen(std::size_t(queries) * std::size_t(keys));
  if (seen.empty()) return seen;
  const auto [program, tables] = planning::first_program(problem);
  for (std::int64_t i = 0; i < queries; ++i) {
    const auto query = rules::coordinate_of(i, problem.q_size);
    for (std::int64_t j = 0; j < keys; ++j) {
      seen[i * keys + j] = rules::sees(program, query, rules::coordinate_of(j, problem.k_size));
    }
  }
  return seen;
}

}  // namespace anyflash
