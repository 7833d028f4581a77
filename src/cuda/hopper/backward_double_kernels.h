// The backward kernels of float64 on Hopper, and what they are given.
#pragma once

#include <cuda.h>

#include "cuda/portable/backward_args.h"

namespace anyflash::cuda {

struct DoubleBackwardArgs : BackwardArgs {
  CUtensorMap maps[2][2];      ///< of sides[i].rows[n]: boxes of 16 channels of 16 queries or 64 keys
  bool has_dlse;               ///< else it is 0
  double* sums;                ///< of dQ: for each query block of each head 64 padded head sizes, zero at first
  double *lse, *delta, *dlse;  ///< of rows in block order: dS = P (dP - delta + dlse); inf, 0, 0: no gradient
  const std::uint64_t* words;  ///< of the tiles that have none in the plan's tables: 64 each, one for each key
  std::int32_t group_head;     ///< of the query heads that share a key head, the launch's; those behind the first add
  std::int32_t* careful;       ///< becomes 1 if a result holds a NaN: it may be a hidden row's
};

struct DoubleBackwardKernels {
  const void* prepare;                    ///< the numbers of rows, from the portable kernel's; dQ's sums, zero
  const void *gradients, *store_queries;  ///< dK, dV and the sums of dQ; dQ from its sums
  int threads, bytes;                     ///< of `gradients`; bytes of shared memory
  int store_threads;                      ///< of `store_queries`
  int key_blocks;                         ///< of a block of threads
};

/// depth: 64 or 128. Scores may need no more than a scale.
DoubleBackwardKernels double_backward_kernels(int depth);

}  // namespace anyflash::cuda
