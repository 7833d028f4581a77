// Arguments of Hopper's decoding kernel, in addition to the portable ones.
#pragma once

#include "cuda/hopper/row_map.h"
#include "cuda/portable/decode_args.h"

namespace anyflash::cuda {

struct BulkDecodeArgs : DecodeArgs {
  RowMap maps[2];         ///< of keys and values: boxes of 64 channels of box_rows rows, never more than a page
  std::int32_t box_rows;  ///< 16, 32 or 64
  bool one_entry[2], one_head[2];  ///< strides of 0: all batch entries (pages), or all heads, have the same rows
};

}  // namespace anyflash::cuda
