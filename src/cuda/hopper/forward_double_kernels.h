// The forward kernels of float64 on Hopper, and their arguments.
#pragma once

#include <cuda.h>

#include "cuda/common/exponential_terms.h"
#include "cuda/portable/forward_args.h"

namespace anyflash::cuda {

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
