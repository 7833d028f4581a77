// Shared by explain.cpp and picture.cpp.
#pragma once

#include <memory>

#include <anyflash/explain.h>

#include "plan/plan.h"

namespace anyflash::planning {

/// The checked problem of a rule on bare shapes; batch and heads as the rule's tables have them.
Problem explained_problem(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                          const ExplainOptions& options);

}  // namespace anyflash::planning
