// Arguments of Hopper's backward kernels, in addition to the portable ones: those of 16-bit types and float32, and those
// of float64.
#pragma once

#include "cuda/portable/backward_args.h"
#include "cuda/tile/row_map.h"

namespace anyflash::cuda {

struct GroupBackwardArgs : BackwardArgs {
  Cut cuts[2];                  ///< of the sides
  RowMap maps[2][2];            ///< of sides[i].rows[n]: boxes of 64 channels of a block's rows
  RowMap key_gradient_maps[2];  ///< the same of the gradients of k and v, if they are wanted
  bool key_gradients_copied;    ///< dk and dv are stored by them
  const char* bf16_terms[2]
                        [2];  ///< float32: blocks of sides[i].rows[n] as bfloat16 terms (split_bf16.h), instead of maps
  bool has_dlse;              ///< if false, dlse is 0
  float* sums;                ///< of dQ: 64 * padded head size for each query block of each head; `prepare` clears them
  std::int32_t tasks;         ///< a task is the key blocks of a head that a thread block computes at a time
  std::int32_t* next_task;    ///< `prepare` clears it
  CUtensorMap bias_map, bias_gradient_map;  ///< boxes of 64 queries and 64 keys
  bool bias_copied;                         ///< TMA loads the bias by the first map; else it is read where it is needed
  bool bias_stored;                         ///< TMA stores its gradient by the second
  /// Sums of the bias's gradient, zero at first, null: none. For each (batch, head) of the bias, each query block and
  /// each key block: 4096 numbers, in the order of a warpgroup's registers.
  float* bias_sums;
  float *lse, *delta, *dlse;       ///< dS = P (dP - delta + dlse), rows in block order; no gradient: inf, 0, 0
  const std::uint64_t* words;      ///< of tiles with none in the plan's tables: 64 each, one per key
  float factor, cap, cap_inverse;  ///< the scale, the soft cap
  std::int32_t alibi_offset;       ///< a pair's coordinates differ by query - key + alibi_offset
  float key_factors[2];            ///< float32: the factors of the sums of dK (and dQ) and of dV
  bool
      masks_on_device;  ///< masks were found on the GPU: not_finite may be 1 from the start, and then these kernels do nothing
  std::int32_t* not_finite;  ///< becomes 1 if a result holds a NaN, which may come from a hidden row
};

struct DoubleBackwardArgs : BackwardArgs {
  CUtensorMap maps[2][2];  ///< of sides[i].rows[n]: boxes of 16 channels of 16 queries or 64 keys
  bool has_dlse;           ///< if false, dlse is 0
  double* sums;            ///< of dQ: 64 * padded head size for each query block of each head; `prepare` clears them
  double *lse, *delta, *dlse;  ///< dS = P (dP - delta + dlse), rows in block order; no gradient: inf, 0, 0
  const std::uint64_t* words;  ///< mask words of the tiles that have none in the plan's tables: 64 each, one per key
  std::int32_t group_head;     ///< query head among those of a key head; launches after the first add
  std::int32_t* not_finite;    ///< becomes 1 if a result holds a NaN, which may come from a hidden row
};

}  // namespace anyflash::cuda
