// Decoding, the forward pass for few query rows: all heads that share a key head at once (PackGQA), with split-KV.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/memory.h"
#include "cuda/portable/forward_args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// Are there so few query rows per key head that decode() computes them, unless the rule prevents it?
bool has_few_rows(const Problem& problem);

/// May decode() compute the call, as far as its sizes and options tell?
bool decode_may_serve(const Problem& problem, const ExecutionPlan& plan);

/// Does decode() compute the call? With more than few rows it does so only by Hopper's kernels, so where rows of q, k
/// and v lie counts too.
bool decode_serves(const Problem& problem, const ExecutionPlan& plan);

/// Are there no masks except lengths, which the kernels know or read themselves?
bool decode_needs_no_masks(const Problem& problem, const ExecutionPlan& plan, bool general);

/// Bytes of workspace of the call.
std::int64_t decode_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Queues the call. call: arguments as for the forward kernel, with masks if it needs them. general: scores need more
/// than a positive scale.
void decode(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, bool general,
            CallMemory& memory, cudaStream_t stream);

}  // namespace anyflash::cuda
