// Decode calls on Hopper, with keys and values loaded by TMA.
#pragma once

#include "cuda/hopper/decode_args.h"
#include "cuda/portable/decode_kernels.h"
#include "problem/problem.h"

namespace anyflash::cuda {

/// Does Hopper's kernel support the call, as far as its sizes and options tell?
bool bulk_decode_serves(const Problem& problem);

/// Makes the maps of keys and values. False if TMA does not support their rows, or those of the queries.
bool map_bulk_decode(const Problem& problem, BulkDecodeArgs& args);

/// Does Hopper's kernel support the call? If so, it replaces kernels.plain, with its sizes, and args get the maps.
/// alone: as in bulk_decode_kernel().
bool take_bulk_decode(const Problem& problem, BulkDecodeArgs& args, DecodeKernels& kernels, bool alone);

}  // namespace anyflash::cuda
