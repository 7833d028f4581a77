// Tile sizes of the kernels of few queries, in one table, by bytes of an element and padded head size.
//
// `row_warps` warps have 8 * slots rows each and share their keys; there are `groups` of them, each of which takes key
// blocks of its own, `keys` keys at a time, with `stages` times as much in flight or at hand. `small` fits into the 64
// KB of shared memory of sm_75; `wide` is for more than 16 rows. docs/design-log.md has the figures.
#pragma once

namespace anyflash::cuda {

template <int slots, int row_warps, int groups, int keys, int stages, int d, int blocks_per_multiprocessor>
struct DecodeSizes {
  static constexpr int kSlots = slots, kRowWarps = row_warps, kGroups = groups, kKeys = keys, kStages = stages;
  static constexpr int kDepth = d, kWarps = row_warps * groups, kRows = 8 * slots * row_warps, kThreads = 32 * kWarps;
  static constexpr int kBlocksPerMultiprocessor = blocks_per_multiprocessor;
  static_assert(64 % keys == 0 && 8 * slots <= 32 && kRows <= kThreads);
};

enum class DecodeTiling { small, large, wide };

template <int bytes, int d, DecodeTiling>
struct DecodeTiles;

// clang-format off
template <> struct DecodeTiles<2,  64, DecodeTiling::large> : DecodeSizes<2, 1, 4, 32, 3,  64, 2> {};
template <> struct DecodeTiles<2, 128, DecodeTiling::large> : DecodeSizes<2, 1, 4, 16, 3, 128, 2> {};
template <> struct DecodeTiles<2, 256, DecodeTiling::large> : DecodeSizes<2, 1, 4, 16, 3, 256, 1> {};
template <> struct DecodeTiles<2,  64, DecodeTiling::wide>  : DecodeSizes<2, 2, 4, 16, 3,  64, 2> {};
template <> struct DecodeTiles<2, 128, DecodeTiling::wide>  : DecodeSizes<2, 2, 4, 16, 3, 128, 1> {};
template <> struct DecodeTiles<2,  64, DecodeTiling::small> : DecodeSizes<2, 1, 4, 16, 2,  64, 1> {};
template <> struct DecodeTiles<2, 128, DecodeTiling::small> : DecodeSizes<2, 1, 4, 16, 1, 128, 1> {};
template <> struct DecodeTiles<2, 256, DecodeTiling::small> : DecodeSizes<2, 1, 2, 16, 1, 256, 1> {};

template <> struct DecodeTiles<4,  64, DecodeTiling::large> : DecodeSizes<2, 1, 4, 16, 3,  64, 2> {};
template <> struct DecodeTiles<4, 128, DecodeTiling::large> : DecodeSizes<2, 1, 4, 16, 3, 128, 1> {};
template <> struct DecodeTiles<4, 256, DecodeTiling::large> : DecodeSizes<2, 1, 2, 16, 3, 256, 1> {};
template <> struct DecodeTiles<4,  64, DecodeTiling::small> : DecodeSizes<2, 1, 4, 16, 1,  64, 1> {};
template <> struct DecodeTiles<4, 128, DecodeTiling::small> : DecodeSizes<2, 1, 2, 16, 1, 128, 1> {};
template <> struct DecodeTiles<4, 256, DecodeTiling::small> : DecodeSizes<2, 1, 1, 16, 1, 256, 1> {};

template <> struct DecodeTiles<8,  64, DecodeTiling::large> : DecodeSizes<1, 1, 4,  8, 3,  64, 2> {};
template <> struct DecodeTiles<8, 128, DecodeTiling::large> : DecodeSizes<1, 1, 4,  8, 3, 128, 1> {};
template <> struct DecodeTiles<8, 256, DecodeTiling::large> : DecodeSizes<1, 1, 2,  8, 3, 256, 1> {};
template <> struct DecodeTiles<8,  64, DecodeTiling::small> : DecodeSizes<1, 1, 4,  8, 1,  64, 1> {};
template <> struct DecodeTiles<8, 128, DecodeTiling::small> : DecodeSizes<1, 1, 2,  8, 1, 128, 1> {};
template <> struct DecodeTiles<8, 256, DecodeTiling::small> : DecodeSizes<1, 1, 1,  8, 1, 256, 1> {};
// clang-format on

/// A part reads at least so many bytes of keys and values.
inline constexpr int kPartBytes = 512 << 10;

}  // namespace anyflash::cuda
