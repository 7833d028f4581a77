// A call as several calls, each on some batch entries and key/value heads: for backends that divide in no other way.
#pragma once

#include <functional>

#include "plan/plan.h"

namespace anyflash::planning {

/// Calls run(problem, plan) for each part of a call, of problem.chunks.groups groups or as near as can be. No part is
/// larger than the first. Axes along which a gradient is summed are not divided.
void for_each_part(const Problem& problem, const ExecutionPlan& plan,
                   const std::function<void(const Problem&, const ExecutionPlan&)>& run);

}  // namespace anyflash::planning
