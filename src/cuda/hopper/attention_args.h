// What the forward kernel of attention.cuh is given, and the sizes of its variants.
#pragma once

#include "cuda/portable/args.h"
#include "cuda/tile/row_map.h"
#include "problem/problem.h"

namespace anyflash::cuda {

/// scale: a positive scale alone. general: a scale of any sign, a soft cap, a bias, ALiBi.
enum class ScoreModKind { scale, general };

struct AttentionArgs {
  RowMap q, k, v;           ///< boxes of 64 channels and a query block's rows; plain keys: as many as a step has
  RowMap k_block, v_block;  ///< boxes of 64 channels and a key block's rows
  CUtensorMap bias_map;     ///< boxes of 64 queries and 128 bytes of keys
  RowMap out_map;           ///< as q
  Rows out;                 ///< channels are neighbours; rows begin on 16 bytes
  Numbers lse, row_sum, row_max;
  bool maxima;                              ///< row_max is the maximum, not any number near it
  bool stores_lse_or_pair;                  ///< lse, row_sum or row_max is given
  bool has_sink_or_pair;                    ///< a sink, row_sum or row_max is given
  Numbers bias, alibi, sink;                ///< data null: none
  std::int32_t alibi_offset;                ///< a pair's coordinates differ by query - key + alibi_offset
  std::int32_t heads, group, queries, d_v;  ///< group: query heads of a key head
  Cut query_cut, key_cut;                   ///< blocks of 64
  const DeviceGroup* groups;                ///< the masks, [batch group][head group]
  std::int32_t batch_groups, head_groups;
  const std::uint64_t* words;                ///< of tiles that have none in the plan's tables
  std::int32_t tiles, tasks, section_heads;  ///< query tiles of a head; heads whose K and V share the L2
  // Traits::kSplit. packs: a key head has so many tasks, whose warpgroups have a head each; 0: they have one. parts: the
  // keys are dealt to so many tasks, part_blocks key blocks each, from first_block on. Results and statistics of more
  // than one part lie as decode's (decode_args.h).
  std::int32_t packs, parts, part_blocks, first_block;
  float *results, *statistics;
  bool early;                  ///< the next task is asked for when one begins, not a step before its end
  std::int32_t* next_task;     ///< 0 before and after a launch
  std::int32_t* again;         ///< becomes kBlocksAgain if a result is not finite
  std::uint8_t* again_blocks;  ///< (batch, heads, query blocks, parts): 1 where one is, else 0; null: nobody asks
  bool masks_on_device;        ///< masks were found on the device: `again` may be kAllAgain before
  float scale, scale_log2;     ///< softmax_scale, and that times log2(e)
  float cap, cap_inverse;      ///< ScoreModKind::general; cap 0: none
};

/// kKeys: of a step. kStages, kQueryStages: of K and of V, of Q. kBlocks: thread blocks of a multiprocessor. kSplit: a
/// task may have a part of the keys (split-KV), and its warpgroups heads of a key head (PackGQA).
template <class E_, int kHeadSize_, int kKeys_, int kWarpgroups_, int kStages_, int kQueryStages_,
          ScoreModKind kScore_ = ScoreModKind::scale, int kBlocks_ = 1, bool kSplit_ = false>
struct AttentionTraits {
  using E = E_;
  static constexpr int kHeadSize = kHeadSize_, kKeys = kKeys_, kWarpgroups = kWarpgroups_;
  static constexpr int kStages = kStages_, kQueryStages = kQueryStages_, kBlocks = kBlocks_;
  static constexpr bool kGeneral = kScore_ == ScoreModKind::general;
  static constexpr bool kSplit = kSplit_;
  static constexpr bool kBoxed = kQueryStages == 2 && !kSplit;                ///< O leaves by TMA, from where Q was
  static constexpr int kBiasBytes = !kGeneral ? 0 : kHeadSize > 128 ? 2 : 4;  ///< of the largest type of a bias
  static constexpr int kCells = kKeys / 64;                                   ///< key blocks of a step
  static constexpr int kQueries = 64 * kWarpgroups, kThreads = 128 * (kWarpgroups + 1);
  // S, P and O take so many of a consumer's registers. 40 for the producer, where they suffice, spill nothing of it.
  static constexpr int kTileRegisters = kHeadSize / 2 + kKeys / 2 + kKeys / 4;
  static constexpr int kProducerRegisters = kTileRegisters > 190 || kBlocks > 1 ? 24 : kWarpgroups == 3 ? 32 : 40;
  static constexpr int kAllRegisters = 65536 / (kBlocks * kThreads) / 8 * 8 * (kWarpgroups + 1);  ///< of a lane of each
  static constexpr int kConsumerRegisters = (kAllRegisters - kProducerRegisters) / kWarpgroups / 8 * 8;
  static_assert(kKeys % 64 == 0, "a step has whole key blocks of 64");
  static_assert(!kGeneral || kKeys == 64, "a step has the bias of one key block");
  static_assert(2 * kWarpgroups * kCells <= 32, "two bits of StepInfo::cells for each query block and key block");
};

struct AttentionKernel {
  const void* function;
  int threads, bytes;     ///< of a thread block; shared memory
  int keys, blocks;       ///< of a step; query blocks of a task
  int bias_bytes;         ///< of the largest type of a bias that it takes
  int on_multiprocessor;  ///< thread blocks at a time
};

/// plain: scores need a positive scale alone. general: they may need more. sparse: as plain; query blocks visit few key
/// blocks, or unlike ones. split: as plain; Traits::kSplit.
enum class AttentionKind { plain, general, sparse, split };
template <ElementType type>
AttentionKernel attention_kernel(int head_size, AttentionKind kind);

}  // namespace anyflash::cuda
