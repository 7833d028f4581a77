// Arguments of the forward kernel of forward_split.cuh, in addition to the portable ones, and the order of tasks.
#pragma once

#include <cuda.h>

#include <algorithm>

#include "cuda/common/exponential_terms.h"
#include "cuda/portable/forward_args.h"
#include "cuda/tile/row_map.h"
#include "problem/problem.h"

namespace anyflash::cuda {

struct SplitForwardArgs : ForwardArgs {
  Cut queries, keys;
  const char* bf16_terms[3];       ///< blocks of q, k and v as bfloat16 terms (split_bf16.h)
  CUtensorMap bias_map;            ///< boxes of 64 queries and 128 bytes of keys
  const std::uint64_t* words;      ///< mask words of the tiles that have none in the plan's tables: 64 each
  float factor, cap, cap_inverse;  ///< the scale, the soft cap
  std::int32_t tasks;              ///< a task is a few neighbouring query blocks of a head
  std::int32_t head_parts;         ///< tasks of a head
  std::int32_t near_heads;         ///< heads whose keys and values fit L2 together: their tasks are interleaved
  std::int32_t* next_task;         ///< 0 at first
  std::int32_t* not_finite;        ///< becomes 1 if a result is not finite, which a hidden value may have caused
};

/// The kernel of a padded head size up to 128, by the number of bfloat16 terms. general: scores may need more than a
/// positive scale.
struct SplitForwardKernel {
  const void* function;
  int threads, bytes;  ///< of a thread block; shared memory
  int blocks;          ///< query blocks of a task
};
SplitForwardKernel split_forward_kernel(int depth, bool general, int bf16_terms);

/// Divides heads into tasks, `parts` each. bytes: of one number of keys and values, as the kernel reads them.
template <class Args>
void order_tasks(Args& args, const Problem& problem, std::int32_t parts, int bytes) {
  constexpr std::int64_t cached_bytes = 20 << 20;  // of keys and values whose tasks are interleaved, to share L2
  const auto heads = problem.batch * problem.heads_q;
  args.head_parts = parts;
  args.tasks = static_cast<std::int32_t>(heads * parts);
  const auto head_bytes = problem.keys() * (problem.d_qk + problem.d_v) * bytes;
  const auto near = std::max(cached_bytes / std::max(head_bytes, std::int64_t{1}), std::int64_t{1}) * args.group_heads;
  args.near_heads = static_cast<std::int32_t>(std::min(near, heads));
}

struct DoubleForwardArgs : ForwardArgs {
  CUtensorMap q_map, k_map, v_map;     ///< boxes of 16 channels of 64 queries or 16 keys
  const std::uint64_t* words;          ///< of tiles with none in the plan's tables: 128 each, one per query
  ScaledExponentialTerms exponential;  ///< of differences of products
  std::int32_t head_parts;             ///< tasks of a head, a query block each
  std::int32_t near_heads;             ///< heads whose keys and values fit L2 together: their tasks are interleaved
  std::int32_t* next_task;             ///< 0 at first
  std::int32_t* not_finite;            ///< becomes 1 if a result is not finite, which a hidden value may have caused
};

struct DoubleForwardKernel {
  const void* function;
  int threads, bytes;  ///< of a block; shared memory
};

/// depth: 64 or 128. Query blocks have 128 rows; scores need only a positive scale.
DoubleForwardKernel double_forward_kernel(int depth);

}  // namespace anyflash::cuda
