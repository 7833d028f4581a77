// What the plan needs to know about a rule besides its words and classes.
#pragma once

#include <memory>
#include <utility>

#include "plan/plan.h"
#include "rules/compile.h"

namespace anyflash::planning {

rules::Shapes shapes_of(const Problem& problem);

/// Does visibility depend only on the difference of two aligned coordinates?
bool by_difference(const rules::Program& program);

/// Does visibility depend only on the documents of query and key?
bool by_document(const rules::Program& program);

/// The program of batch entry 0, head 0, and the owner of its tables.
std::pair<rules::Program, std::shared_ptr<const void>> first_program(const Problem& problem);

}  // namespace anyflash::planning
