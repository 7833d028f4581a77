// Tile sizes of the backward kernels, in one table.
//
// A thread block holds kRows = 8 * slots * warps rows of one side and walks the other `columns` rows at a time, for
// head sizes up to d. With two stages the next step's rows are loaded meanwhile. `resident`: the own rows stay in
// shared memory. Otherwise there is one tile of each side at a time, and two thread blocks compute the two gradients of
// keys. `small` fits the 64 KB of shared memory of sm_75; `tf32` is for float32 with allow_tf32, and fits where `large`
// does. docs/notes/portable-gpu.md has the figures.
#pragma once

#include "cuda/portable/tuning.h"

namespace anyflash::cuda {

template <int slots, int warps, int columns, int d, int stages = 1, int blocks_per_multiprocessor = 1,
          bool resident = d <= 128, bool tf32 = false>
struct GradientSizes {
  static constexpr int kRowGroups = slots, kColumns = columns, kDepth = d, kStages = stages;
  static constexpr int kRows = 8 * slots * warps, kThreads = 32 * warps;
  static constexpr int kBlocksPerMultiprocessor = blocks_per_multiprocessor;
  static constexpr bool kResident = resident, kTf32 = tf32;
  static constexpr int kResults = kResident ? 2 : 1;  ///< gradients that a thread block computes
  static_assert(kResident || kStages == 1);
  static_assert(64 % kRows == 0 && 64 % columns == 0 && columns <= kThreads, "blocks are cells of 64");
};

/// By bytes of an element and padded head size.
template <int bytes, int d, Tiling>
struct GradientTiles;

// clang-format off
template <> struct GradientTiles<2,  64, Tiling::large> : GradientSizes<2, 4, 64,  64, 2, 2> {};
template <> struct GradientTiles<2, 128, Tiling::large> : GradientSizes<2, 4, 64, 128, 1, 2> {};
template <> struct GradientTiles<2, 256, Tiling::large> : GradientSizes<2, 4, 64, 256, 1, 2> {};
template <> struct GradientTiles<2,  64, Tiling::small> : GradientSizes<2, 4, 64,  64> {};
template <> struct GradientTiles<2, 128, Tiling::small> : GradientSizes<2, 4, 32, 128> {};
template <> struct GradientTiles<2, 256, Tiling::small> : GradientSizes<2, 4, 32, 256> {};

template <> struct GradientTiles<4,  64, Tiling::large> : GradientSizes<4, 2, 16,  64, 2, 4> {};
template <> struct GradientTiles<4, 128, Tiling::large> : GradientSizes<2, 4, 32, 128, 1, 3, false> {};
template <> struct GradientTiles<4, 256, Tiling::large> : GradientSizes<2, 4, 32, 256, 1, 2> {};
template <> struct GradientTiles<4,  64, Tiling::tf32>  : GradientSizes<2, 4, 64,  64, 1, 2, true,  true> {};
template <> struct GradientTiles<4, 128, Tiling::tf32>  : GradientSizes<2, 4, 32, 128, 1, 2, false, true> {};
template <> struct GradientTiles<4, 256, Tiling::tf32>  : GradientSizes<2, 4, 32, 256, 1, 1, false, true> {};
template <> struct GradientTiles<4,  64, Tiling::small> : GradientSizes<2, 4, 32,  64> {};
template <> struct GradientTiles<4, 128, Tiling::small> : GradientSizes<2, 2, 16, 128> {};
template <> struct GradientTiles<4, 256, Tiling::small> : GradientSizes<2, 2, 16, 256> {};

template <> struct GradientTiles<8,  64, Tiling::large> : GradientSizes<2, 4, 32,  64, 1, 2> {};
template <> struct GradientTiles<8, 128, Tiling::large> : GradientSizes<2, 4, 32, 128, 1, 2, false> {};
template <> struct GradientTiles<8, 256, Tiling::large> : GradientSizes<1, 4, 16, 256, 1, 2> {};
template <> struct GradientTiles<8,  64, Tiling::small> : GradientSizes<1, 4, 16,  64> {};
template <> struct GradientTiles<8, 128, Tiling::small> : GradientSizes<1, 2,  8, 128> {};
template <> struct GradientTiles<8, 256, Tiling::small> : GradientSizes<1, 2,  8, 256> {};
// clang-format on

}  // namespace anyflash::cuda
