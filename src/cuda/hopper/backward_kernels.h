// Hopper's backward kernels by element type and head size. One file compiles those of each type.
#pragma once

#include "problem/problem.h"

namespace anyflash::cuda {

struct GroupBackwardKernels {
  const void* prepare;                    ///< row terms; zeroes dQ's sums
  const void *gradients, *store_queries;  ///< dK, dV and the sums of dQ and of the bias's gradient; dQ from its sums
  const void* store_bias;                 ///< the bias's gradient from its sums
  int threads, bytes;                     ///< of `gradients`; bytes of shared memory
  int key_blocks;                         ///< of a task
  int store_threads = 128;                ///< of `store_queries`
};

/// How scores are computed.
enum class ScoreKind {
  scaled,    ///< scale only
  finished,  ///< scale, soft cap, and a bias that TMA loads
  any,       ///< scale, soft cap, and a bias that is read number by number
};

template <ElementType type>
GroupBackwardKernels group_backward_kernels(int depth, ScoreKind kind);
/// Up to 128 channels, scores that need only a scale. `prepare` expects the portable kernel's row terms, and each task
/// has a thread block of its own. bf16_terms: bfloat16 terms of a number.
GroupBackwardKernels group_backward_kernels_float32(int depth, int bf16_terms);
/// The same of float64.
GroupBackwardKernels group_backward_kernels_float64(int depth);

}  // namespace anyflash::cuda
