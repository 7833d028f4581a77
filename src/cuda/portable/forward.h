// The forward pass on every NVIDIA GPU from sm_75 up.
#pragma once

#include "plan/plan.h"

namespace anyflash::cuda {

/// The boxes that the kernel of this problem takes.
TileMenu forward_menu(const Problem& problem);

/// Queues the call on the problem's stream.
void forward(const Problem& problem, const ExecutionPlan& plan, char* workspace);

}  // namespace anyflash::cuda
