// The backward pass on every NVIDIA GPU from sm_75 up.
#pragma once

#include "plan/plan.h"

namespace anyflash::cuda {

/// The boxes that the kernels of this problem take.
TileMenu backward_menu(const Problem& problem);

/// Bytes that a call works in, beside its tensors and the plan: a few numbers a query row.
std::int64_t backward_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Queues the call on the problem's stream.
void backward(const Problem& problem, const ExecutionPlan& plan, char* workspace);

}  // namespace anyflash::cuda
