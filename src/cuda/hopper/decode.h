// Decode calls on Hopper, with keys and values loaded by TMA.
#pragma once

#include "cuda/hopper/decode_args.h"
#include "cuda/portable/decode_kernels.h"
#include "problem/problem.h"

namespace anyflash::cuda {

/// Does Hopper's kernel support the call? If so, it replaces kernels.plain, with its sizes, and args get the maps.
bool take_bulk_decode(const Problem& problem, BulkDecodeArgs& args, DecodeKernels& kernels);

}  // namespace anyflash::cuda
