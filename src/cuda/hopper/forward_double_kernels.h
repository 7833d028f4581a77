// The forward kernels of float64 on Hopper, and what they are given.
#pragma once

#include <cuda.h>

#include "cuda/common/exponential_terms.h"
#include "cuda/portable/forward_args.h"

namespace anyflash::cuda {

struct DoubleForwardArgs : ForwardArgs {
  CUtensorMap q_map, k_map, v_map;  ///< boxes of 16 channels of 64 queries or 16 keys
  const std::uint64_t* words;       ///< of the tiles that have none in the plan's tables: 128 each, one for each query
  ScaledExponentialTerms exponential;  ///< of differences of products
  std::int32_t head_parts;             ///< tasks of a head, a query block each
  std::int32_t near_heads;  ///< heads whose keys and values fit the cache together: their tasks are taken in turns
  std::int32_t* next_task;  ///< 0 at first
  std::int32_t* careful;    ///< becomes 1 if a result is not finite: the fault may be a hidden value's
};

struct DoubleForwardKernel {
  const void* function;
  int threads, bytes;  ///< of a block; shared memory
};

/// depth: 64 or 128. Query blocks have 128 rows, scores need no more than a positive scale.
DoubleForwardKernel double_forward_kernel(int depth);

}  // namespace anyflash::cuda
