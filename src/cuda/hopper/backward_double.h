// The float64 gradients on Hopper in one walk, instead of the portable kernel's: as backward.h, for float64.
#pragma once

#include "cuda/hopper/backward.h"

namespace anyflash::cuda {

bool double_backward_serves(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& args);
std::int64_t double_backward_workspace(const Problem& problem, const ExecutionPlan& plan);
GroupBackwardResult double_backward(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& args,
                                    DevicePlan& masks, char* workspace, const PortableTerms& terms,
                                    cudaStream_t stream);

}  // namespace anyflash::cuda
