// The decode kernels by element type and head size. One file compiles those of each type.
#pragma once

#include "cuda/portable/decode_tuning.h"

namespace anyflash::cuda {

struct DecodeKernels {
  const void *parts, *plain;          ///< one part of the keys, some rows of a key head; plain calls only, or null
  int keys;                           ///< of a tile
  int rows, values;                   ///< of a task, and channels of v
  int threads, shared_bytes, blocks;  ///< blocks: thread blocks per multiprocessor
  const void* joins[4];               ///< join the partial results, with 1, 2, 4 or 8 warps for each row
  bool in_turns = true;               ///< persistent thread blocks take one task after another; else each has one task
  static constexpr int join_threads = 256;
};

/// depth: padded head size, 64, 128 or 256. `narrow` exists only for 16 bits, `wide` only for 16 bits and up to 128.
struct DecodeKind {
  int depth;
  DecodeTiling tiling;
};

DecodeKernels decode_kernels_float16(DecodeKind kind);
DecodeKernels decode_kernels_bfloat16(DecodeKind kind);
DecodeKernels decode_kernels_float32(DecodeKind kind);
DecodeKernels decode_kernels_float64(DecodeKind kind);

}  // namespace anyflash::cuda
