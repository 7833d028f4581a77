// Predicted time of a call on the CPU: what the choice of chunks goes by, and `explain --plan` prints.
//
//   compute    tiles that are visited x time of a tile: (a + b (d_qk + d_v)), by type and direction; of a partial tile
//              the share that is computed
//   memory     numbers that are packed or streamed: keys, queries and results
//   exchange   between memories: 0 on a CPU
#pragma once

#include <string>

#include <anyflash/explain.h>

#include "plan/plan.h"

namespace anyflash::planning {

/// How much of the plan's tiles is computed, in tiles of 64 x 64 pairs, of all mask groups.
struct Work {
  double full = 0, partial = 0;   ///< tiles; of partial ones those parts that are computed
  double partial_tiles = 0;       ///< visited
  double key_loads = 0;           ///< visits of a key block by a query block
  double query_blocks_rows = 64;  ///< rows of a query block
};

/// Classes are counted; the shares of partial tiles are those of a sample.
Work work_of(const ExecutionPlan& plan);

/// The predicted time of a call with problem.chunks.
PlanCost cost_of(const Problem& problem, const ExecutionPlan& plan, const Work& work, const Calibration& machine);

}  // namespace anyflash::planning
