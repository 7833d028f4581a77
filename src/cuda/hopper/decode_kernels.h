// Hopper's decoding kernels by element type, head size and rows. One file compiles those of each type.
#pragma once

namespace anyflash::cuda {

struct BulkDecodeKernel {
  const void* function;
  int rows;            ///< of a task
  int threads, bytes;  ///< of a block; shared memory
  int blocks;          ///< on a multiprocessor
  bool in_turns;       ///< as in DecodeKernels
};

/// depth: padded head size, 64, 128 or 256. rows: how many share a key head.
BulkDecodeKernel bulk_decode_kernel_float16(int depth, int rows);
BulkDecodeKernel bulk_decode_kernel_bfloat16(int depth, int rows);

}  // namespace anyflash::cuda
