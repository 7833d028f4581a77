// The forward pass on Hopper's warpgroups, instead of the portable kernel where it is faster.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/device_plan.h"
#include "cuda/common/stream_counters.h"
#include "cuda/portable/forward_args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// Bytes of its workspace, 0 if it does not support the call.
std::int64_t group_forward_workspace(const Problem& problem, const ExecutionPlan& plan);

/// What the non-finite fallback, the portable kernel, has to compute again, as in ForwardArgs. Nulls: everything, for
/// the first time.
struct Again {
  std::int32_t* any = nullptr;
  const std::uint8_t* blocks = nullptr;
  std::int32_t notes = 0;
  StreamCounters counters{};  ///< that `any` is of, perhaps: to be held until the fallback is queued
};

/// Queues the call, if it is supported. general: scores may need more than a positive scale. workspace: as above.
Again group_forward(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& args, bool general,
                    DevicePlan& masks, char* workspace, cudaStream_t stream);

}  // namespace anyflash::cuda
