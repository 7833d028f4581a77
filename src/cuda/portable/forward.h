// The forward pass on every NVIDIA GPU from sm_75 up.
#pragma once

#include "plan/plan.h"

namespace anyflash::cuda {

/// The boxes that the kernel of this problem takes.
TileMenu forward_menu(const Problem& problem);

/// Bytes that a call works in, beside the plan and the table of pages.
std::int64_t forward_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Queues the call on the problem's stream.
void forward(const Problem& problem, const ExecutionPlan& plan, char* workspace);

}  // namespace anyflash::cuda
