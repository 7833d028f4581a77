// Arguments of Hopper's decoding kernel, in addition to the portable ones.
#pragma once

#include "cuda/portable/decode_args.h"
#include "cuda/tile/row_map.h"
#include "problem/problem.h"

namespace anyflash::cuda {

struct BulkDecodeArgs : DecodeArgs {
  RowMap maps[2];         ///< of keys and values: boxes of 64 channels of box_rows rows, never more than a page
  std::int32_t box_rows;  ///< 16, 32 or 64
  bool one_entry[2], one_head[2];  ///< strides of 0: all batch entries (pages), or all heads, have the same rows
};

struct BulkDecodeKernel {
  const void* function;
  int rows;            ///< of a task
  int threads, bytes;  ///< of a block; shared memory
};

/// depth: padded head size, 64, 128 or 256. rows: how many share a key head. masked: as in DecodeArgs. alone: thread
/// blocks share no multiprocessor, and the order of sums may depend on the batch.
template <ElementType type>
BulkDecodeKernel bulk_decode_kernel(int depth, int rows, bool masked, bool alone);

}  // namespace anyflash::cuda
