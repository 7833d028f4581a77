// The kernels of few queries by element type and head size. One file compiles those of each type.
#pragma once

#include "cuda/portable/decode_tuning.h"

namespace anyflash::cuda {

struct DecodeKernels {
  const void *parts, *plain;  ///< a part of the keys, for some rows of a key head; of plain calls alone. Null: none
  int keys;                   ///< of a tile
  int rows, values;           ///< of a task, and channels of v
  int threads, shared_bytes, blocks;  ///< blocks: of threads, on a multiprocessor
  const void* join;                   ///< of what the parts leave
  bool in_turns = true;  ///< blocks stay and take tasks in turns: else each has one, when the GPU has room for it
  static constexpr int join_threads = 256;
};

/// depth: padded head size, 64, 128 or 256. There is no `narrow` but for 16 bits, no `wide` but for 16 bits and up to
/// 128.
struct DecodeKind {
  int depth;
  DecodeTiling tiling;
};

DecodeKernels decode_kernels_float16(DecodeKind kind);
DecodeKernels decode_kernels_bfloat16(DecodeKind kind);
DecodeKernels decode_kernels_float32(DecodeKind kind);
DecodeKernels decode_kernels_float64(DecodeKind kind);

}  // namespace anyflash::cuda
