// The gradients on Hopper's warpgroups, in place of the portable kernel's where they are faster.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/hopper/backward_args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// Do they serve this call?
bool group_backward_serves(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& args);

/// Bytes that they work in.
std::int64_t group_backward_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Queues them; args.terms are made before. Returns where a number of the workspace says, when all is done, whether the
/// gradients have to be made again, with care: not 0 if one of them is NaN. Null if no pair is hidden, so never.
const std::int32_t* group_backward(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& args,
                                   char* workspace, cudaStream_t stream);

}  // namespace anyflash::cuda
