// The forward kernels of float32 and float64 on Hopper, and their arguments in addition to the portable ones.
#pragma once

#include <cuda.h>

#include "cuda/common/exponential_terms.h"
#include "cuda/portable/forward_args.h"
#include "cuda/tile/row_map.h"

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

struct DoubleForwardArgs : ForwardArgs {
  CUtensorMap q_map, k_map, v_map;     ///< boxes of 16 channels of 64 queries or 16 keys
  const std::uint64_t* words;          ///< of tiles with none in the plan's tables: 128 each, one per query
  ScaledExponentialTerms exponential;  ///< of differences of products
  std::int32_t head_parts;             ///< tasks of a head, a query block each
  std::int32_t near_heads;             ///< heads whose keys and values fit L2 together: their tasks are interleaved
  std::int32_t* next_task;             ///< 0 at first
  std::int32_t* not_finite;            ///< becomes 1 if a result is not finite, which a hidden value may have caused
};

struct GroupForwardKernel {
  const void* function;
  int threads, bytes;  ///< of a thread block; shared memory
  int blocks;          ///< query blocks of a task
};

/// The kernel of a padded head size up to 128, by the number of bfloat16 terms. general: scores may need more than a
/// positive scale.
GroupForwardKernel split_forward_kernel(int depth, bool general, int bf16_terms);

/// depth: 64 or 128. Query blocks have 128 rows; scores need only a positive scale.
GroupForwardKernel double_forward_kernel(int depth);

}  // namespace anyflash::cuda
