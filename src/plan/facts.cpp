#include "plan/facts.h"

#include <algorithm>

namespace anyflash::planning {
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

bool by_difference(const rules::Program& program) {
  using rules::AtomKind;
  return !program.restarts && std::all_of(program.atoms, program.atoms + program.atom_count, [](const auto& atom) {
    return atom.kind == AtomKind::full || atom.kind == AtomKind::causal || atom.kind == AtomKind::local ||
           atom.kind == AtomKind::window;
  });
}

bool by_document(const rules::Program& program) {
  using rules::AtomKind;
  return program.has_documents && std::all_of(program.atoms, program.atoms + program.atom_count, [](const auto& atom) {
           return atom.kind == AtomKind::full || atom.kind == AtomKind::documents;
         });
}

std::pair<rules::Program, std::shared_ptr<const void>> first_program(const Problem& problem) {
  auto tables = std::make_shared<rules::Tables>();
  auto program = rules::compile(problem.rule, shapes_of(problem), 0, 0, *tables);
  return {program, std::move(tables)};
}

}  // namespace anyflash::planning
