// Plans in the caller's hands: what they were made for is kept with them and compared with each call.
#pragma once

#include "plan/plan.h"

namespace anyflash {

/// Notes in the pair what it was made for.
void keep(const Problem& problem, detail::PlanPair& pair);

/// Throws Error if the plan was made for other shapes, types or options than the problem's.
void check_same(const detail::PlanPair& pair, const Problem& problem);

}  // namespace anyflash
