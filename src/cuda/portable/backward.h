// The backward pass on every NVIDIA GPU from sm_75 up.
#pragma once

#include "plan/plan.h"

namespace anyflash::cuda {

/// The block shapes that the kernels of this problem accept.
TileMenu backward_menu(const Problem& problem);

/// Bytes of workspace of a call: a few numbers per query row.
std::int64_t backward_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Queues the call on the problem's stream.
void backward(const Problem& problem, const ExecutionPlan& plan, char* workspace);

}  // namespace anyflash::cuda
