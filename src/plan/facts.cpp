#include "plan/facts.h"

#include <algorithm>

#include "rules/node.h"

namespace anyflash::planning {
namespace {

using rules::Node;
using rules::NodeKind;

/// A table has the axes (batch, heads, rows, columns) or the last of them; document ids have (batch, entries).
bool has_batch_axis(const Node& node) {
  switch (node.kind) {
    case NodeKind::documents: return node.table_q.rank == 2 || node.table_k.rank == 2;
    case NodeKind::blocks:
    case NodeKind::dense: return node.table_q.rank == 4;
    default: return false;
  }
}

void add_axes(const Node& node, TableAxes& axes) {
  if (node.left) add_axes(*node.left, axes);
  if (node.right) add_axes(*node.right, axes);
  if (has_batch_axis(node)) {
    axes.batch_axis = true;
    for (const auto* table : {&node.table_q, &node.table_k}) {
      if (table->rank == (node.kind == NodeKind::documents ? 2 : 4)) axes.batch = std::max(axes.batch, table->shape[0]);
    }
  }
  const bool has_heads = node.kind == NodeKind::blocks || node.kind == NodeKind::dense;
  if (has_heads && node.table_q.rank >= 3) axes.heads = std::max(axes.heads, node.table_q.shape[node.table_q.rank - 3]);
}

std::shared_ptr<const Node> without_batch_tables(const std::shared_ptr<const Node>& node) {
  if (has_batch_axis(*node)) return std::make_shared<Node>();
  if (!node->left) return node;
  auto copy = std::make_shared<Node>(*node);
  copy->left = without_batch_tables(node->left);
  if (node->right) copy->right = without_batch_tables(node->right);
  return copy;
}

}  // namespace

rules::Shapes shapes_of(const Problem& problem) {
  rules::Shapes shapes;
  shapes.dimensions = problem.dimensions;
  shapes.q_size = problem.q_size;
  shapes.k_size = problem.k_size;
  shapes.align = problem.align;
  shapes.batch = problem.batch;
  shapes.heads = problem.heads_q;
  shapes.cu_seqlens_q = problem.cu_seqlens_q;
  shapes.cu_seqlens_k = problem.cu_seqlens_k;
  return shapes;
}

TableAxes table_axes(const Rule& rule) {
  TableAxes axes;
  add_axes(rule.node(), axes);
  return axes;
}

Rule without_batch_tables(const Rule& rule) {
  return Rule(without_batch_tables(std::make_shared<const Node>(rule.node())));
}

bool by_difference(const rules::Program& program) {
  using rules::AtomKind;
  return !program.restarts && std::all_of(program.atoms, program.atoms + program.atom_count, [](const auto& atom) {
    return atom.kind == AtomKind::full || atom.kind == AtomKind::causal || atom.kind == AtomKind::local ||
           atom.kind == AtomKind::window;
  });
}

std::pair<rules::Program, std::shared_ptr<const void>> first_program(const Problem& problem) {
  auto tables = std::make_shared<rules::Tables>();
  auto program = rules::compile(problem.rule, shapes_of(problem), 0, 0, *tables);
  return {program, std::move(tables)};
}

}  // namespace anyflash::planning
