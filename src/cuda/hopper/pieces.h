// float32 tensors in pieces of bfloat16 (common/pieces.cuh), as Hopper's kernels multiply them.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/pieces.h"
#include "cuda/portable/args.h"
#include "cuda/portable/launch.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// Can a scale of scores be divided by the square of kPieceScale?
inline bool bears_pieces(double scale) {
  const double size = scale < 0 ? -scale : scale;
  return size == 0 || (size > 0x1p-60 && size < 0x1p120);
}

/// Where the pieces of a tensor's rows, kPieceScale times as large, go. Each block of 64 rows of the grid is an image
/// of the tiles in shared memory: piece by piece, panels of 64 channels, rows of 128 bytes whose 16-byte chunks are
/// swizzled; zeros where there is no row or channel. Blocks of a head lie one behind the other.
struct PieceRows {
  Rows rows;
  rules::Grid grid;
  std::int32_t blocks, heads, channels;
  bool plain;  ///< blocks are plain rows
  char* to;
};

inline constexpr int kMostPieceRows = 4;

/// Some tensors at once.
struct PieceArgs {
  PieceRows tensors[kMostPieceRows];
  std::int64_t first_block[kMostPieceRows + 1];  ///< of each among those of all
  std::int32_t depth;                            ///< padded head size
  std::int32_t pieces;                           ///< of a number
};

/// Of a number of this call. Where results must not depend on what else is in the batch they are all: the portable
/// kernels, which make a call again in which something is not finite, have no fewer bits.
inline int piece_count(const Problem& problem) {
  return allows_tf32(problem) && !problem.deterministic ? kTf32Pieces : kPieces;
}

PieceRows piece_rows_of(const Problem& problem, const Operand& operand, const Grid& grid, std::int64_t heads,
                        std::int64_t channels);

/// Says where the pieces of some tensors go, one behind the other. Returns the bytes that they take.
std::int64_t place_pieces(PieceArgs& args, int tensors, std::int64_t batch, char* memory);

/// Queues the splitting.
void split_rows(PieceArgs args, int tensors, std::int64_t batch, cudaStream_t stream);

}  // namespace anyflash::cuda
