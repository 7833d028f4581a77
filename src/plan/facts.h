// What the plan asks of a rule beside its words and classes.
#pragma once

#include <memory>
#include <utility>

#include "plan/plan.h"
#include "rules/compile.h"

namespace anyflash::planning {

rules::Shapes shapes_of(const Problem& problem);

/// The axes that the rule's tables (documents, blocks, dense) have for the batch and the heads.
struct TableAxes {
  bool batch_axis = false;            ///< a table has an axis for the batch, be it of size 1
  std::int64_t batch = 1, heads = 1;  ///< the largest sizes
};
TableAxes table_axes(const Rule& rule);

/// The rule with `full` in place of every table that has an axis for the batch.
Rule without_batch_tables(const Rule& rule);

/// Does it depend on the difference of two aligned coordinates alone, whether a query sees a key?
bool by_difference(const rules::Program& program);

/// The program of batch entry 0, head 0, and what keeps its tables alive.
std::pair<rules::Program, std::shared_ptr<const void>> first_program(const Problem& problem);

}  // namespace anyflash::planning
