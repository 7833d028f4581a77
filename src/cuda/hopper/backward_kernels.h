// Hopper's backward kernels by element type and head size. One file compiles those of each type.
#pragma once

namespace anyflash::cuda {

struct GroupBackwardKernels {
  const void* prepare;                    ///< the numbers of rows; dQ's sums, zero
  const void *gradients, *store_queries;  ///< dK, dV and the sums of dQ and of the bias's gradient; dQ from its sums
  const void* store_bias;                 ///< the bias's gradient from its sums
  int threads, bytes;                     ///< of `gradients`; bytes of shared memory
  int key_blocks;                         ///< of a task
};

/// What scores need.
enum class ScoreKind {
  scaled,    ///< a scale
  finished,  ///< that, a soft cap and a bias that the copy engine brings
  any,       ///< that, and a bias that is read one number at a time
};

GroupBackwardKernels group_backward_kernels_float16(int depth, ScoreKind kind);
GroupBackwardKernels group_backward_kernels_bfloat16(int depth, ScoreKind kind);
/// Up to 128 channels, scores that need no more than a scale. `prepare` expects the portable kernel's numbers of rows,
/// and a task is a block of threads. pieces: of a number.
GroupBackwardKernels group_backward_kernels_float32(int depth, int pieces);

}  // namespace anyflash::cuda
