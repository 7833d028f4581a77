// float32 tensors as bfloat16 terms (common/split_bf16.cuh), in the layout that Hopper's kernels multiply.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/split_bf16.h"
#include "cuda/portable/args.h"
#include "cuda/portable/launch.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// Can the scale of scores be divided by the square of kSplitScale?
inline bool splits_exactly(double scale) {
  const double size = scale < 0 ? -scale : scale;
  return size == 0 || (size > 0x1p-60 && size < 0x1p120);
}

/// The destination of the bfloat16 terms of a tensor's rows, scaled by kSplitScale. Each block of 64 rows of the grid
/// is an image of the tiles in shared memory: term after term, panels of 64 channels, rows of 128 bytes with swizzled
/// 16-byte chunks, zeros where there is no row or channel. The blocks of a head follow one another.
struct SplitRows {
  Rows rows;
  rules::Grid grid;
  std::int32_t blocks, heads, channels;
  bool plain;  ///< blocks' rows are consecutive
  char* to;
};

inline constexpr int kMostSplitRows = 4;

/// Several tensors at once.
struct SplitArgs {
  SplitRows tensors[kMostSplitRows];
  std::int64_t first_block[kMostSplitRows + 1];  ///< of each among those of all
  std::int32_t depth;                            ///< padded head size
  std::int32_t bf16_terms;                       ///< bfloat16 terms of a number

  std::int64_t block_bytes() const { return std::int64_t{64} * depth * 2 * bf16_terms; }
  std::int64_t bytes() const { return first_block[kMostSplitRows] * block_bytes(); }
};

/// The number of bfloat16 terms in this call. It is three if results must not depend on other batch entries: the
/// portable kernels, which recompute a call with non-finite results, use no fewer bits.
inline int bf16_term_count(const Problem& problem) {
  return allows_tf32(problem) && !problem.deterministic ? kTf32Terms : kBf16Terms;
}

/// Describes the split of a call's q, dout (in a backward call), k and v, in this order, into `memory`, one after
/// another. memory null: only their bytes are wanted.
SplitArgs split_of(const Problem& problem, const ExecutionPlan& plan, char* memory);

/// Queues the split.
void split_rows(SplitArgs args, cudaStream_t stream);

}  // namespace anyflash::cuda
