// Plans that callers hold: what a plan was made for is kept with it and compared in each call.
#pragma once

#include "plan/plan.h"

namespace anyflash {

/// Records in the pair what it was made for.
void keep(const Problem& problem, detail::PlanPair& pair);

/// Throws Error if the plan was made for other shapes, types or options than the problem's.
void check_same(const detail::PlanPair& pair, const Problem& problem);

}  // namespace anyflash
