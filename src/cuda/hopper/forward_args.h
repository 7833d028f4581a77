// Arguments of Hopper's forward kernels, in addition to the portable ones.
#pragma once

#include <algorithm>

#include "cuda/hopper/row_map.h"
#include "cuda/portable/forward_args.h"
#include "problem/problem.h"

namespace anyflash::cuda {

struct GroupForwardArgs : ForwardArgs {
  Cut queries, keys;
  RowMap q_map, k_map, v_map, out_map;  ///< boxes of 64 channels of a block's rows
  const char* bf16_terms[3];            ///< float32: blocks of q, k and v as bfloat16 terms (split_bf16.h)
  CUtensorMap bias_map;                 ///< boxes of 64 queries and 128 bytes of keys
  const std::uint64_t* words;           ///< mask words of the tiles that have none in the plan's tables: 64 each
  float factor, cap, cap_inverse;       ///< the scale, the soft cap
  std::int32_t tasks;                   ///< a task is a few neighbouring query blocks of a head
  std::int32_t head_parts;              ///< tasks of a head
  std::int32_t near_heads;              ///< heads whose keys and values fit L2 together: their tasks are interleaved
  std::int32_t* next_task;              ///< 0 at first
  bool
      masks_on_device;  ///< masks were found on the GPU: not_finite may be 1 from the start, and then this kernel does nothing
  std::int32_t* not_finite;  ///< becomes 1 if a result is not finite, which a hidden value may have caused
};

/// Divides heads into tasks, `parts` each. bytes: of one number of keys and values, as the kernel reads them.
template <class Args>
void order_tasks(Args& args, const Problem& problem, std::int32_t parts, int bytes) {
  constexpr std::int64_t cached_bytes = 20 << 20;  // of keys and values whose tasks are interleaved, to share L2
  const auto heads = problem.batch * problem.heads_q;
  args.head_parts = parts;
  args.tasks = static_cast<std::int32_t>(heads * parts);
  const auto head_bytes = problem.keys() * (problem.d_qk + problem.d_v) * bytes;
  const auto near = std::max(cached_bytes / std::max(head_bytes, std::int64_t{1}), std::int64_t{1}) * args.group_heads;
  args.near_heads = static_cast<std::int32_t>(std::min(near, heads));
}

}  // namespace anyflash::cuda
