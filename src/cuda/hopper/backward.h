// The gradients on Hopper's warpgroups, in place of the portable kernel's where they are faster.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "cuda/common/device_plan.h"
#include "cuda/hopper/backward_args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// Do they serve this call?
bool group_backward_serves(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& args);

/// Bytes that they work in.
std::int64_t group_backward_workspace(const Problem& problem, const ExecutionPlan& plan);

/// What has become of a call.
struct GroupBackwardResult {
  bool made;                      ///< false: nothing, the portable kernels have to make the gradients
  bool made_bias;                 ///< that of the bias, too
  const std::int32_t* remake_if;  ///< they have to make all again, with care, if this is not 0 in the end
};

/// What the portable kernels do for these: they queue what fills args.terms, and then terms.rest.
struct PortableTerms {
  std::function<void(BackwardArgs&)> find, find_rests;
};

/// Queues them and args.terms, if the copy engine takes all tensors.
GroupBackwardResult group_backward(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& args,
                                   DevicePlan& masks, char* workspace, const PortableTerms& terms, cudaStream_t stream);

}  // namespace anyflash::cuda
