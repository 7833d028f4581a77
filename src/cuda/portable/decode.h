// The forward pass for few queries: all heads that share a key head at once, the keys in parts.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/memory.h"
#include "cuda/portable/forward_args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// So few queries of the heads that share a key head that, unless a rule is in the way, decode() serves them.
bool has_few_rows(const Problem& problem);

bool decode_serves(const Problem& problem, const ExecutionPlan& plan);

/// Are there no masks but lengths, which the kernels know or read themselves?
bool decode_needs_no_masks(const Problem& problem, const ExecutionPlan& plan, bool general);

/// Bytes that the call works in.
std::int64_t decode_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Queues the call. call: as for the forward kernel, with the masks if it needs them. general: scores need more than a
/// positive scale.
void decode(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, bool general,
            CallMemory& memory, cudaStream_t stream);

}  // namespace anyflash::cuda
