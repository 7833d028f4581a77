// Tile sizes of the decode kernels, in one table, by bytes of an element and padded head size.
//
// Each of `warps` warps has all 8 * slots rows and takes key blocks of its own, `keys` keys at a time, in `stages`
// pipeline stages. `small` fits the 64 KB of shared memory of sm_75; `wide` is for more than 16 rows, `narrow` for
// plain calls of up to 8. docs/notes/gpu-decode.md has the figures.
#pragma once

namespace anyflash::cuda {

template <int slots, int warps, int keys, int stages, int d, int blocks_per_multiprocessor>
struct DecodeSizes {
  static constexpr int kRowGroups = slots, kWarps = warps, kKeys = keys, kStages = stages;
  static constexpr int kDepth = d, kRows = 8 * slots, kThreads = 32 * warps;
  static constexpr int kBlocksPerMultiprocessor = blocks_per_multiprocessor;
  static_assert(64 % keys == 0 && kRows <= 32, "words of a block's rows are found by a warp at once");
};

enum class DecodeTiling { small, large, wide, narrow };

template <int bytes, int d, DecodeTiling>
struct DecodeTiles;

// clang-format off
template <> struct DecodeTiles<2,  64, DecodeTiling::large> : DecodeSizes<2, 4, 16, 6,  64, 2> {};
template <> struct DecodeTiles<2, 128, DecodeTiling::large> : DecodeSizes<2, 4, 16, 3, 128, 2> {};
template <> struct DecodeTiles<2, 256, DecodeTiling::large> : DecodeSizes<2, 4, 16, 3, 256, 1> {};
template <> struct DecodeTiles<2,  64, DecodeTiling::wide>  : DecodeSizes<4, 4, 16, 5,  64, 2> {};
template <> struct DecodeTiles<2, 128, DecodeTiling::wide>  : DecodeSizes<4, 8, 16, 2, 128, 1> {};
template <> struct DecodeTiles<2,  64, DecodeTiling::narrow> : DecodeSizes<1, 4, 16, 6,  64, 2> {};
template <> struct DecodeTiles<2, 128, DecodeTiling::narrow> : DecodeSizes<1, 4, 16, 3, 128, 2> {};
template <> struct DecodeTiles<2, 256, DecodeTiling::narrow> : DecodeSizes<1, 4, 16, 3, 256, 1> {};
template <> struct DecodeTiles<2,  64, DecodeTiling::small> : DecodeSizes<2, 4, 16, 2,  64, 1> {};
template <> struct DecodeTiles<2, 128, DecodeTiling::small> : DecodeSizes<2, 4, 16, 1, 128, 1> {};
template <> struct DecodeTiles<2, 256, DecodeTiling::small> : DecodeSizes<2, 2, 16, 1, 256, 1> {};

template <> struct DecodeTiles<4,  64, DecodeTiling::large> : DecodeSizes<2, 4, 16, 3,  64, 2> {};
template <> struct DecodeTiles<4, 128, DecodeTiling::large> : DecodeSizes<2, 4, 16, 3, 128, 1> {};
template <> struct DecodeTiles<4, 256, DecodeTiling::large> : DecodeSizes<2, 2, 16, 3, 256, 1> {};
template <> struct DecodeTiles<4,  64, DecodeTiling::small> : DecodeSizes<2, 4, 16, 1,  64, 1> {};
template <> struct DecodeTiles<4, 128, DecodeTiling::small> : DecodeSizes<2, 2, 16, 1, 128, 1> {};
template <> struct DecodeTiles<4, 256, DecodeTiling::small> : DecodeSizes<2, 1, 16, 1, 256, 1> {};

template <> struct DecodeTiles<8,  64, DecodeTiling::large> : DecodeSizes<1, 4,  8, 3,  64, 2> {};
template <> struct DecodeTiles<8, 128, DecodeTiling::large> : DecodeSizes<1, 4,  8, 3, 128, 1> {};
template <> struct DecodeTiles<8, 256, DecodeTiling::large> : DecodeSizes<1, 2,  8, 3, 256, 1> {};
template <> struct DecodeTiles<8,  64, DecodeTiling::small> : DecodeSizes<1, 4,  8, 1,  64, 1> {};
template <> struct DecodeTiles<8, 128, DecodeTiling::small> : DecodeSizes<1, 2,  8, 1, 128, 1> {};
template <> struct DecodeTiles<8, 256, DecodeTiling::small> : DecodeSizes<1, 1,  8, 1, 256, 1> {};
// clang-format on

/// Minimum sizes of a part: bytes of keys and values, key blocks, a multiple of the size of its partial results, and a
/// share of the bytes read for a batch entry.
inline constexpr int kPartBytes = 512 << 10, kPartBlocks = 16, kPartResults = 32, kPartsOfEntry = 512;

/// Where parts may depend on the batch and a head is longer than kPartBytes: the minimum bytes of a part, half as many
/// for up to 16 rows of few heads; the most parts that a thread block joins quickly; the maximum bytes of a part if
/// lengths may differ. Heads are few, and split if they are shorter too, from so many multiprocessors for each on.
inline constexpr int kLeastPartBytes = 256 << 10, kPartsJoined = 64, kMostPartBytes = 4 << 20, kFewHeads = 8;

/// The parts of a row are added in so many separate sums, which are then added.
inline constexpr int kJoinSums = 8;

/// If at most so many thread blocks join, the next kernel's thread blocks fit on every multiprocessor beside them. Rows
/// have several warps that join them, up to a thread block, where no more blocks are needed.
inline constexpr int kJoinsBeside = 256;

}  // namespace anyflash::cuda
