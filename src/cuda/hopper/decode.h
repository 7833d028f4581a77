// Plain calls of few queries on Hopper, whose keys and values the copy engine brings.
#pragma once

#include "cuda/hopper/decode_args.h"
#include "cuda/portable/decode_kernels.h"
#include "problem/problem.h"

namespace anyflash::cuda {

/// Does Hopper's kernel serve a plain call? Then it takes the place of kernels.plain, with its sizes, and args have the
/// maps.
bool take_bulk_decode(const Problem& problem, BulkDecodeArgs& args, DecodeKernels& kernels);

}  // namespace anyflash::cuda
