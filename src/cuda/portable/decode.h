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

/// Does decode() compute the call? With more than few rows it does so only by Hopper's kernels, where these are faster
/// than the forward kernel, so how q, k, v and out lie counts too.
bool decode_serves(const Problem& problem, const ExecutionPlan& plan);

/// Are there no masks except lengths, which the kernels know or read themselves?
bool decode_needs_no_masks(const Problem& problem, const ExecutionPlan& plan, bool general);

/// Bytes of workspace of the call.
std::int64_t decode_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Queues the call. call: arguments as for the forward kernel, with masks if it needs them. general: scores need more
/// than a positive scale.
void decode(const Problem& problem, const ExecutionPlan& plan, const ForwardArgs& call, bool general,
            CallMemory& memory, cudaStream_t stream);

/// The keys of a call of another kernel as parts, each a task of its own (split-KV).
struct KeyParts {
  std::int64_t count = 1, blocks = 0x7fffffff, first = 0;  ///< key blocks of a part; the first one
};

/// How many parts are fastest where a call of Hopper's forward kernel has too few tasks for all multiprocessors.
/// step_keys: of a step of the kernel. few_visits: one part would be that of the kernel for few visits.
KeyParts key_parts(const Problem& problem, const ExecutionPlan& plan, std::int64_t step_keys, std::int64_t tasks,
                   bool few_visits = false);

/// Rows of the parts' results, and the bytes of these and their statistics; 0 if there is one part.
std::int64_t part_rows(const Problem& problem, const KeyParts& parts);
std::int64_t part_bytes(const Problem& problem, const KeyParts& parts);

/// Queues the joining of parts' results, which lie as those of decode() (decode_args.h), in float32.
void join_parts(const Problem& problem, const ForwardArgs& call, std::int32_t parts, float* results, float* statistics,
                cudaStream_t stream);

}  // namespace anyflash::cuda
