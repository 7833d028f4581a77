// The float64 forward pass on Hopper, instead of the portable kernel's: as forward.h, for float64.
#pragma once

#include "cuda/hopper/forward.h"

namespace anyflash::cuda {

std::int64_t double_forward_workspace(const Problem& problem, const ExecutionPlan& plan);
const std::int32_t* double_forward(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& args,
                                   bool general, DevicePlan& masks, char* workspace, cudaStream_t stream);

}  // namespace anyflash::cuda
