// Figures of a rule and its plan, and the pattern by definition.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <map>

#include <anyflash/explain.h>

#include "backends.h"
#include "plan/explained.h"
#include "plan/facts.h"
#include "problem/checks.h"
#include "problem/tensor.h"
#include "rules/classes.h"
#include "rules/sees.h"
#include "rules/words.h"

namespace anyflash {
namespace planning {
namespace {

constexpr std::int64_t most_entries = std::numeric_limits<std::int32_t>::max();

void check_head_size(const char* name, std::int64_t size, std::int64_t largest) {
  if (size >= 1 && size <= largest) return;
  problem::fail_value(name, "head size " + std::to_string(size) + ", expected 1 to " + std::to_string(largest));
}

void check_shape(const SequenceShape& sequence, const char* name) {
  const auto fail = [&](const std::string& expected) {
    throw Error(Error::Kind::value, std::string(name) + ": " + text_of(sequence) + ", expected " + expected);
  };
  if (sequence.empty() || sequence.size() > 3) fail("1 to 3 sizes");
  double entries = 1;
  for (const auto size : sequence) {
    if (size < 0 || size > most_entries) fail("sizes from 0 to 2147483647");
    entries *= double(size);
  }
  if (entries > double(most_entries)) fail("a sequence of at most 2147483647 entries");
}

TensorView shape_view(ElementType type, std::int64_t batch, std::int64_t heads, const SequenceShape& sequence,
                      std::int64_t channels) {
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

/// Blocks with at least one entry, by their index among those.
std::vector<std::int32_t> blocks_with_entries(const Grid& grid) {
  std::vector<std::int32_t> found;
  for (std::int64_t block = 0; block < grid.count(); ++block) {
    if (rules::inside(grid.box(std::int32_t(block)).origin, grid.size)) found.push_back(std::int32_t(block));
  }
  return found;
}

std::int64_t count_with_entries(const Grid& grid) {
  std::int64_t count = 1;
  for (int i = 0; i < 3; ++i) {
    std::int64_t blocks = 0;
    for (std::int32_t residue = 0; residue < grid.step[i]; ++residue) {
      blocks += (rules::class_length(grid.size[i], residue, grid.step[i]) + grid.extent[i] - 1) / grid.extent[i];
    }
    count *= blocks;
  }
  return count;
}

std::int64_t rows_inside(const Box& block, Int3 size) {
  std::int64_t rows = 1;
  for (int i = 0; i < 3; ++i) {
    const auto left = (std::int64_t(size[i]) - block.origin[i] + block.step[i] - 1) / block.step[i];
    rows *= std::clamp<std::int64_t>(left, 0, block.extent[i]);
  }
  return rows;
}

/// Visible pairs of a tile, counted from its words.
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

/// Visible pairs of partial tiles. Where a rule depends only on coordinate differences, so do the pairs of a tile that
/// is wholly inside the sequences: they are counted once for each difference.
class TileCounter {
 public:
  TileCounter(const ExecutionPlan& plan, const rules::Program& program)
      : plan_(plan), program_(program), by_difference_(by_difference(program_)) {}

  std::int64_t in_run(const Box& queries, const Run& run) {
    const auto& grid = plan_.key_grid;
    const auto row_blocks = grid.chunks(2), row_step = grid.extent[2] * grid.step[2];
    const bool queries_whole = by_difference_ && rules::whole(queries, program_.q_size());
    std::int64_t visible = 0;
    Box keys{};
    for (auto block = run.first; block < run.first + run.count; ++block) {
      if (block == run.first || block % row_blocks == 0) {
        keys = grid.box(block);
      } else {
        keys.origin[2] += row_step;  // cheaper than a new box
      }
      visible += queries_whole && rules::whole(keys, program_.k_size()) ? known(queries, keys) : in_tile(queries, keys);
    }
    return visible;
  }

 private:
  using Difference = std::array<std::int64_t, 3>;
  static constexpr std::size_t most_known = 1 << 16;

  std::int64_t known(const Box& queries, const Box& keys) {
    Difference difference;
    for (int i = 0; i < 3; ++i) {
      difference[i] = program_.axis[i].query(queries.origin[i]) - program_.axis[i].key(keys.origin[i]);
    }
    if (const auto found = known_.find(difference); found != known_.end()) return found->second;
    if (known_.size() == most_known) known_.clear();
    return known_[difference] = in_tile(queries, keys);
  }

  std::int64_t in_tile(const Box& queries, const Box& keys) const {
    return visible_in_tile(program_, queries, plan_.query_grid.size, keys, plan_.key_grid.size);
  }

  const ExecutionPlan& plan_;
  const rules::Program& program_;
  const bool by_difference_;
  std::map<Difference, std::int64_t> known_;
};

struct Counts {
  std::int64_t visible = 0, partial = 0, full = 0;
};

Counts count(const ExecutionPlan& plan, const MaskGroup& group) {
  const auto& list = group.keys_of_query_block;
  const auto key_rows = rules::volume(plan.key_grid.extent);
  std::int64_t visible = 0, partial = 0, full = 0;
  TileCounter tiles(plan, group.program);
#pragma omp parallel for schedule(dynamic, 16) reduction(+ : visible, partial, full) firstprivate(tiles) \
    num_threads(plan.threads)
  for (std::int64_t block = 0; block < plan.query_grid.count(); ++block) {
    const auto queries = plan.query_grid.box(std::int32_t(block));
    for (auto r = list.start[block]; r < list.start[block + 1]; ++r) {
      const auto& run = list.runs[r];
      if (run.kind == TileClass::full) {
        full += run.count;
        visible += rows_inside(queries, plan.query_grid.size) * run.count * key_rows;
      } else {
        partial += run.count;
        visible += tiles.in_run(queries, run);
      }
    }
  }
  return {visible, partial, full};
}

std::vector<std::uint8_t> classes_of(const ExecutionPlan& plan) {
  const auto query_blocks = blocks_with_entries(plan.query_grid), key_blocks = blocks_with_entries(plan.key_grid);
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
  check_shape(q_shape, "q_shape");
  check_shape(k_shape, "k_shape");
  if (k_shape.size() != q_shape.size()) {
    throw Error(Error::Kind::value, "k_shape: " + text_of(k_shape) + ", expected " + std::to_string(q_shape.size()) +
                                        " sizes as in q_shape");
  }
  check_head_size("d_qk", options.d_qk, largest_d_qk);
  check_head_size("d_v", options.d_v, largest_d_v);
  const auto axes = rules::table_axes(rule);
  Options call;
  call.rule = rule;
  call.align = options.align;
  const auto q = shape_view(options.type, axes.batch, axes.heads, q_shape, options.d_qk);
  const auto k = shape_view(options.type, axes.batch, axes.heads, k_shape, options.d_qk);
  const auto v = shape_view(options.type, axes.batch, axes.heads, k_shape, options.d_v);
  auto problem = shape_problem(q, k, v, call, options.backward ? Direction::backward : Direction::forward);
  rules::check(rule, shapes_of(problem));
  return problem;
}

}  // namespace planning

Explanation explain(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                    const ExplainOptions& options) {
  const auto problem = planning::explained_problem(rule, q_shape, k_shape, options);
  const auto plan = make_plan(problem, backend_of(problem.device).menu(problem));
  const auto counts = planning::count(*plan, plan->groups[0]);

  Explanation result;
  result.queries = problem.queries();
  result.keys = problem.keys();
  result.visible_pairs = counts.visible;
  result.tiles_partial = counts.partial;
  result.tiles_full = counts.full;
  result.query_blocks = planning::count_with_entries(plan->query_grid);
  result.key_blocks = planning::count_with_entries(plan->key_grid);
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
    result.tile_classes = planning::classes_of(*plan);
  }
  return result;
}

std::int64_t visible_pairs(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options) {
  const auto problem = shape_problem(q, k, v, options);
  rules::check(problem.rule, planning::shapes_of(problem));
  if (problem.tables_on_device) throw Error(Error::Kind::value, "visible_pairs: lengths on a GPU, expected the CPU");
  if (!problem.has_pairs()) return 0;
  const auto plan = make_plan(problem, backend_of(problem.device).menu(problem));
  std::int64_t visible = 0;
  for (const auto& group : plan->groups) visible += planning::count(*plan, group).visible;
  return visible * (problem.batch / plan->batch_groups) * (problem.heads_q / plan->head_groups);
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
