// What the forward kernel of attention.cuh is given, and the sizes of its variants.
#pragma once

#include "cuda/hopper/row_map.h"
#include "cuda/portable/args.h"

namespace anyflash::cuda {

/// words: the runs and words of a plan, for any rule and any boxes. The others need neither, and plain rows.
enum class MaskKind { full, causal, words };
/// scale: a positive scale alone. general: a scale of any sign, a soft cap.
enum class ScoreModKind { scale, general };

struct AttentionArgs {
  RowMap q, k, v;           ///< boxes of 64 channels and a query block's rows, or as many rows as a step has keys
  RowMap k_block, v_block;  ///< words: boxes of 64 channels and a key block's rows
  Rows out;                 ///< channels are neighbours; rows begin on 16 bytes
  float* lse;               ///< (batch, heads, queries), or null
  Numbers sink;             ///< a number for each head; data null: none
  std::int32_t heads, group, queries, keys;  ///< group: query heads of a key head
  std::int32_t diagonal;                     ///< causal: query i sees keys 0 .. i + diagonal
  Cut query_cut, key_cut;                    ///< words: blocks of 64
  const DeviceGroup* groups;                 ///< words: the masks, [batch group][head group]
  std::int32_t batch_groups, head_groups;
  const std::uint64_t* words;                ///< words: of tiles that have none in the plan's tables
  std::int32_t tiles, tasks, section_heads;  ///< query tiles of a head; heads whose K and V share the L2
  std::int32_t* next_task;                   ///< 0 before and after a launch
  std::int32_t* not_finite;                  ///< becomes 1 if a result is not finite, for the non-finite fallback
  float scale_log2;                          ///< ScoreModKind::scale: softmax_scale * log2(e)
  float scale, cap, cap_inverse;             ///< ScoreModKind::general; cap 0: none
};

/// kKeys: of a step. kStages, kQueryStages: of K and of V, of Q. kOrdered: warpgroups issue products one after the
/// other.
template <class E_, int kHeadSize_, int kKeys_, int kWarpgroups_, int kStages_, int kQueryStages_, MaskKind kMask_,
          ScoreModKind kScore_ = ScoreModKind::scale, bool kOrdered_ = true>
struct AttentionTraits {
  using E = E_;
  static constexpr int kHeadSize = kHeadSize_, kKeys = kKeys_, kWarpgroups = kWarpgroups_;
  static constexpr int kStages = kStages_, kQueryStages = kQueryStages_;
  static constexpr MaskKind kMask = kMask_;
  static constexpr ScoreModKind kScore = kScore_;
  static constexpr bool kOrdered = kOrdered_;
  static constexpr bool kWords = kMask == MaskKind::words;
  static constexpr int kCells = kWords ? kKeys / 64 : 1;  ///< key blocks of a step
  static constexpr int kQueries = 64 * kWarpgroups, kThreads = 128 * (kWarpgroups + 1);
  // S, P and O take so many of a consumer's registers. 232 and 40, where they suffice, spill nothing of the producer.
  static constexpr int kTileRegisters = kHeadSize / 2 + kKeys / 2 + kKeys / 4;
  static constexpr bool kWide = kTileRegisters > 190;
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : kWide ? 24 : 40;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : kWide ? 240 : 232;
  static_assert(!kWords || kKeys % 64 == 0, "a step has whole key blocks of 64");
  static_assert(2 * kWarpgroups * kCells <= 32, "two bits of StepInfo::cells for each query block and key block");
};

}  // namespace anyflash::cuda
