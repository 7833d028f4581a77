// What the plan asks of a rule beside its words and classes.
#pragma once

#include <memory>
#include <utility>

#include "plan/plan.h"
#include "rules/compile.h"

namespace anyflash::planning {

rules::Shapes shapes_of(const Problem& problem);

/// Does it depend on the difference of two aligned coordinates alone, whether a query sees a key?
bool by_difference(const rules::Program& program);

/// Does it depend on the documents of the two alone?
bool by_document(const rules::Program& program);

/// The program of batch entry 0, head 0, and what keeps its tables alive.
std::pair<rules::Program, std::shared_ptr<const void>> first_program(const Problem& problem);

}  // namespace anyflash::planning
