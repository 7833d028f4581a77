// The forward pass of 16-bit types on Hopper, in place of the portable kernel's where that is slower.
#pragma once

#include "cuda/hopper/forward.h"

namespace anyflash::cuda {

/// Does it compute the call, if TMA takes the tensors, as they lie? docs/design.md has the conditions.
bool attention_serves(const Problem& problem, const ExecutionPlan& plan);

/// As group_forward_workspace() and group_forward(), of 16-bit types.
std::int64_t attention_workspace(const Problem& problem, const ExecutionPlan& plan);
Again attention(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, bool general,
                DevicePlan& masks, char* workspace, cudaStream_t stream);

}  // namespace anyflash::cuda
