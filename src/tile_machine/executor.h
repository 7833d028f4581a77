// The simulator: executes a mapping on arenas, and counts what it does.
#pragma once

#include "tile_machine/planner.h"

namespace anyflash::simulator {

/// Executes the call and writes its results. Returns what was counted, in the form of the planner's own evaluation.
struct Execution {
  Evaluation counted;
  double visible_pairs = 0;
  std::vector<TileTransfer> transfers;  ///< if the call's choice asks for a trace
};
Execution execute(const Call& call, const Mapping& mapping);

}  // namespace anyflash::simulator
