// float32 tensors as bfloat16 terms (common/pieces.cuh), in the layout that Hopper's kernels multiply.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/pieces.h"
#include "cuda/portable/args.h"
#include "cuda/portable/launch.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// Can the scale of scores be divided by the square of kPieceScale?
inline bool bears_pieces(double scale) {
  const double size = scale < 0 ? -scale : scale;
  return size == 0 || (size > 0x1p-60 && size < 0x1p120);
}

/// The destination of the bfloat16 terms of a tensor's rows, scaled by kPieceScale. Each block of 64 rows of the grid
/// is an image of the tiles in shared memory: term after term, panels of 64 channels, rows of 128 bytes with swizzled
/// 16-byte chunks, zeros where there is no row or channel. The blocks of a head follow one another.
struct PieceRows {
  Rows rows;
  rules::Grid grid;
  std::int32_t blocks, heads, channels;
  bool plain;  ///< blocks' rows are consecutive
  char* to;
};

inline constexpr int kMostPieceRows = 4;

/// Several tensors at once.
struct PieceArgs {
  PieceRows tensors[kMostPieceRows];
  std::int64_t first_block[kMostPieceRows + 1];  ///< of each among those of all
  std::int32_t depth;                            ///< padded head size
  std::int32_t pieces;                           ///< bfloat16 terms of a number
};

/// The number of bfloat16 terms in this call. It is three if results must not depend on other batch entries: the
/// portable kernels, which recompute a call with non-finite results, use no fewer bits.
inline int piece_count(const Problem& problem) {
  return allows_tf32(problem) && !problem.deterministic ? kTf32Pieces : kPieces;
}

PieceRows piece_rows_of(const Problem& problem, const Operand& operand, const Grid& grid, std::int64_t heads,
                        std::int64_t channels);

/// Assigns memory to the bfloat16 terms of several tensors, one after another. Returns the bytes that they take.
std::int64_t place_pieces(PieceArgs& args, int tensors, std::int64_t batch, char* memory);

/// Queues the split.
void split_rows(PieceArgs args, int tensors, std::int64_t batch, cudaStream_t stream);

}  // namespace anyflash::cuda
