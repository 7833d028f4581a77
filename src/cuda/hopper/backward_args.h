// What the backward kernels of Hopper are given, beside what the portable ones are.
#pragma once

#include "cuda/hopper/row_map.h"
#include "cuda/portable/backward_args.h"

namespace anyflash::cuda {

struct GroupBackwardArgs : BackwardArgs {
  Cut cuts[2];                  ///< of the sides
  RowMap maps[2][2];            ///< of sides[i].rows[n]: boxes of 64 channels of a block's rows
  RowMap key_gradient_maps[2];  ///< the same of the gradients of k and v, if they are wanted
  bool key_gradients_copied;    ///< by them
  const char* pieces[2][2];     ///< of float32: blocks of sides[i].rows[n] (pieces.h), in place of maps
  bool has_dlse;                ///< else it is 0
  float* sums;                  ///< of dQ: for each query block of each head 64 padded head sizes, zero at first
  std::int32_t tasks;           ///< a task is the key blocks of a head that a block of threads takes at a time
  std::int32_t* next_task;      ///< 0 at first
  CUtensorMap bias_map, bias_gradient_map;  ///< boxes of 64 queries and 64 keys
  bool bias_copied;                         ///< the bias comes by the first map, else it is read as it is needed
  bool bias_stored;                         ///< its gradient leaves by the second
  /// Sums of the bias's gradient, zero at first, null: none: of each (batch, head) of the bias, each query block and
  /// each key block, 4096 in the order of a warpgroup's registers.
  float* bias_sums;
  float *lse, *delta, *dlse;       ///< of rows in block order: dS = P (dP - delta + dlse); inf, 0, 0: no gradient
  const std::uint64_t* words;      ///< of the tiles that have none in the plan's tables: 64 each, one for each key
  float factor, cap, cap_inverse;  ///< the scale, the soft cap
  float key_factors[2];            ///< of float32: what the sums of dK (and dQ) and of dV are multiplied by
  bool late;  ///< masks were found on the device: careful may be 1 from the start, and then all is left to others
  std::int32_t* careful;  ///< becomes 1 if a result holds a NaN: it may be a hidden row's
};

}  // namespace anyflash::cuda
