// The forward pass on every NVIDIA GPU from sm_75 up.
#pragma once

#include "plan/plan.h"

namespace anyflash::cuda {

/// The block shapes that the kernel of this problem accepts.
TileMenu forward_menu(const Problem& problem);

/// Bytes of workspace of a call, without the plan and the page table.
std::int64_t forward_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Queues the call on the problem's stream.
void forward(const Problem& problem, const ExecutionPlan& plan, char* workspace);

}  // namespace anyflash::cuda
