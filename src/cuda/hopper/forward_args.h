// What the forward kernels of Hopper are given, beside what the portable ones are.
#pragma once

#include "cuda/hopper/row_map.h"
#include "cuda/portable/forward_args.h"

namespace anyflash::cuda {

struct GroupForwardArgs : ForwardArgs {
  Cut queries, keys;
  RowMap q_map, k_map, v_map, out_map;  ///< boxes of 64 channels of a block's rows
  const char* pieces[3];                ///< of float32: blocks of q, k and v (pieces.h)
  CUtensorMap bias_map;                 ///< boxes of 64 queries and 128 bytes of keys
  const std::uint64_t* words;  ///< of the tiles that have none in the plan's tables: 64 each
  float factor, cap, cap_inverse;  ///< the scale, the soft cap
  std::int32_t tasks;       ///< a task is a few neighbouring query blocks of a head
  std::int32_t head_parts;  ///< tasks of a head
  std::int32_t near_heads;  ///< heads whose keys and values fit the cache together: their tasks are taken in turns
  std::int32_t* next_task;  ///< 0 at first
  bool late;  ///< masks were found on the device: careful may be 1 from the start, and then all is left to others
  std::int32_t* careful;    ///< becomes 1 if a result is not finite: the fault may be a hidden value's
};

}  // namespace anyflash::cuda
