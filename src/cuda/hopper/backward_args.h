// What the backward kernels of Hopper are given, beside what the portable ones are.
#pragma once

#include <cuda.h>

#include "cuda/portable/backward_args.h"

namespace anyflash::cuda {

struct GroupBackwardArgs : BackwardArgs {
  CUtensorMap maps[2][2];  ///< of sides[i].rows[n]: boxes of 64 channels of the rows that a block of threads loads
  bool mapped;             ///< there are maps: blocks are plain rows
  float* sums;             ///< of dQ: for each query block of each head 64 padded head sizes, zero at first
  float *lse, *delta;      ///< of rows in block order: dS = P (dP - delta); inf and 0: no gradient
  std::uint64_t* words;    ///< of the tiles that have none in the plan's tables: 64 each, one for each key
  float factor;            ///< the scale
  std::int32_t* careful;   ///< becomes 1 if a result holds a NaN: it may be a hidden row's
};

}  // namespace anyflash::cuda
