// The backward kernels of float64 on Hopper, and their arguments.
#pragma once

#include <cuda.h>

#include "cuda/portable/backward_args.h"

namespace anyflash::cuda {

struct DoubleBackwardArgs : BackwardArgs {
  CUtensorMap maps[2][2];      ///< of sides[i].rows[n]: boxes of 16 channels of 16 queries or 64 keys
  bool has_dlse;               ///< if false, dlse is 0
  double* sums;                ///< of dQ: 64 * padded head size for each query block of each head, zero at first
  double *lse, *delta, *dlse;  ///< dS = P (dP - delta + dlse), rows in block order; no gradient: inf, 0, 0
  const std::uint64_t* words;  ///< mask words of the tiles that have none in the plan's tables: 64 each, one per key
  std::int32_t group_head;     ///< query head among those of a key head; launches after the first add
  std::int32_t* not_finite;    ///< becomes 1 if a result holds a NaN, which may come from a hidden row
};

struct DoubleBackwardKernels {
  const void* prepare;                    ///< row terms from the portable kernel's; zeroes dQ's sums
  const void *gradients, *store_queries;  ///< dK, dV and the sums of dQ; dQ from its sums
  int threads, bytes;                     ///< of `gradients`; bytes of shared memory
  int store_threads;                      ///< of `store_queries`
  int key_blocks;                         ///< of a thread block
};

/// depth: 64 or 128. Scores need only a scale.
DoubleBackwardKernels double_backward_kernels(int depth);

}  // namespace anyflash::cuda
