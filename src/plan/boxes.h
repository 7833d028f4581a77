// The boxes that blocks of a sequence can be: the candidates, and the choice among them.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace anyflash::planning {

/// One way of cutting both sequences into boxes.
struct Cut {
  Grid queries, keys;
};

/// Every cut worth trying for the menu. `stride`: in each dimension the distance (in aligned coordinates) between the
/// keys that a query can see, 1 where the rule has none. Blocks may take every stride-th entry. Larger query blocks
/// come first, so that they win where the cost is the same.
std::vector<Cut> candidate_cuts(const Problem& problem, const TileMenu& menu, Int3 stride);

/// The cut with the least estimated cost: visited pairs, padding included, and visited tiles, over a sample of query
/// blocks. Depends only on the rule, the sizes and the menu.
Cut cheapest_cut(const std::vector<Cut>& cuts, const rules::Program& program, const TileMenu& menu, Int3 k_size);

}  // namespace anyflash::planning
