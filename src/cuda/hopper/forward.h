// The forward pass on Hopper's warpgroups, in place of the portable kernel's where it is faster.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/device_plan.h"
#include "cuda/portable/forward_args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// Bytes that it works in, 0 if it does not serve the call.
std::int64_t group_forward_workspace(const Problem& problem, const ExecutionPlan& plan);

/// What the portable kernel has to make again, with care, as ForwardArgs has it. Of nulls: all, for the first time.
struct Again {
  const std::int32_t* any = nullptr;
  const std::uint8_t* blocks = nullptr;
};

/// Queues it, if it serves the call. general: scores may need more than a positive scale. workspace: as above.
Again group_forward(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& args, bool general,
                    DevicePlan& masks, char* workspace, cudaStream_t stream);

}  // namespace anyflash::cuda
