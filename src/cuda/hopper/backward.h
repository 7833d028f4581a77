// The gradients on Hopper's warpgroups, instead of the portable kernel's where they are faster.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "cuda/common/device_plan.h"
#include "cuda/hopper/backward_args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// Do these kernels support the call?
bool group_backward_serves(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& args);

/// Bytes of their workspace.
std::int64_t group_backward_workspace(const Problem& problem, const ExecutionPlan& plan);

/// What these kernels have computed of a call.
struct GroupBackwardResult {
  bool made;                      ///< false: nothing; the portable kernels have to compute the gradients
  bool made_bias;                 ///< the bias's gradient too
  const std::int32_t* remake_if;  ///< if this is not 0 in the end, the non-finite fallback computes all again
};

/// What the portable kernels do for these: they queue what computes args.terms, and then terms.rest.
struct PortableTerms {
  std::function<void(BackwardArgs&)> find, find_rests;
};

/// Queues args.terms and the kernels, if TMA supports all tensors.
GroupBackwardResult group_backward(const Problem& problem, const ExecutionPlan& plan, const BackwardArgs& args,
                                   DevicePlan& masks, char* workspace, const PortableTerms& terms, cudaStream_t stream);

}  // namespace anyflash::cuda
