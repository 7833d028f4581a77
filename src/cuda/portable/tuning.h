// Tile sizes of the portable kernels, in one table.
//
// A kernel works on kRows = 8 * slots * warps queries, `keys` keys at a time, for head sizes up to d (q, k) and
// `values` channels of v. Wider values are split over several thread blocks. `small` fits the 64 KB of shared memory of
// sm_75. `large` is for GPUs from sm_80 up into whose shared memory it fits. `group` is for the fallback of Hopper's
// own kernels; both use the same plan, so it has their 64 queries, or 128 for float64. `tf32` replaces `large` for
// float32 with allow_tf32, with the same queries.
// docs/notes/portable-gpu.md has the figures.
#pragma once

namespace anyflash::cuda {

template <int slots, int warps, int keys, int d, int values, int blocks_per_multiprocessor = 1, bool tf32 = false>
struct TileSizes {
  static constexpr int kRowGroups = slots, kWarps = warps, kKeys = keys, kDepth = d, kValues = values;
  static constexpr int kRows = 8 * slots * warps, kThreads = 32 * warps;
  static constexpr int kBlocksPerMultiprocessor = blocks_per_multiprocessor;
  static constexpr bool kTf32 = tf32;
  static_assert(64 % keys == 0 && values <= d, "key blocks are cells of 64; results leave through the queries' memory");
};

enum class Tiling { small, large, group, tf32 };

#if defined(__CUDA_ARCH__)
/// Can one of the GPUs that are compiled for be asked for these tiles? large_bytes: shared memory of the large tiles;
/// from sm_80 on all GPUs have 99 KB.
template <unsigned large_bytes>
__device__ constexpr bool tiling_fits(Tiling tiling) {
  if (__CUDA_ARCH__ < 800) return tiling == Tiling::small;
  return tiling == Tiling::large || tiling == Tiling::tf32 || (tiling == Tiling::small && large_bytes > 99 << 10);
}
#endif

/// By bytes of an element and padded head size.
template <int bytes, int d, Tiling>
struct Tiles;

// clang-format off
template <> struct Tiles<2,  64, Tiling::large>  : TileSizes<4, 4, 64,  64,  64, 2> {};
template <> struct Tiles<2, 128, Tiling::large>  : TileSizes<4, 4, 64, 128, 128, 2> {};
template <> struct Tiles<2, 256, Tiling::large>  : TileSizes<2, 8, 64, 256, 256> {};
template <> struct Tiles<2,  64, Tiling::group>  : TileSizes<2, 4, 64,  64,  64, 3> {};
template <> struct Tiles<2, 128, Tiling::group>  : TileSizes<2, 4, 64, 128, 128, 2> {};
template <> struct Tiles<2, 256, Tiling::group>  : TileSizes<2, 4, 64, 256, 256, 1> {};
template <> struct Tiles<2,  64, Tiling::small> : TileSizes<2, 4, 64,  64,  64> {};
template <> struct Tiles<2, 128, Tiling::small> : TileSizes<2, 4, 32, 128, 128> {};
template <> struct Tiles<2, 256, Tiling::small> : TileSizes<2, 2, 32, 256, 256> {};

template <> struct Tiles<4,  64, Tiling::large>  : TileSizes<2, 4, 64,  64,  64, 2> {};
template <> struct Tiles<4, 128, Tiling::large>  : TileSizes<2, 4, 32, 128, 128, 2> {};
template <> struct Tiles<4, 256, Tiling::large>  : TileSizes<2, 4, 32, 256, 128> {};
template <> struct Tiles<4,  64, Tiling::group>  : TileSizes<2, 4, 64,  64,  64, 2> {};
template <> struct Tiles<4, 128, Tiling::group>  : TileSizes<2, 4, 64, 128, 128, 2> {};
template <> struct Tiles<4, 256, Tiling::group>  : TileSizes<2, 4, 32, 256, 128> {};
template <> struct Tiles<4,  64, Tiling::tf32>  : TileSizes<2, 4, 64,  64,  64, 2, true> {};
template <> struct Tiles<4, 128, Tiling::tf32>  : TileSizes<2, 4, 32, 128, 128, 2, true> {};
template <> struct Tiles<4, 256, Tiling::tf32>  : TileSizes<2, 4, 32, 256, 128, 1, true> {};
template <> struct Tiles<4,  64, Tiling::small> : TileSizes<2, 4, 32,  64,  64> {};
template <> struct Tiles<4, 128, Tiling::small> : TileSizes<2, 4, 16, 128, 128> {};
template <> struct Tiles<4, 256, Tiling::small> : TileSizes<2, 2, 16, 256, 128> {};

template <> struct Tiles<8,  64, Tiling::large>  : TileSizes<2, 4, 64,  64,  64> {};
template <> struct Tiles<8, 128, Tiling::large>  : TileSizes<2, 4, 32, 128, 128> {};
template <> struct Tiles<8, 256, Tiling::large>  : TileSizes<1, 4, 16, 256, 128> {};
template <> struct Tiles<8,  64, Tiling::group>  : TileSizes<2, 8, 64,  64,  64> {};
template <> struct Tiles<8, 128, Tiling::group>  : TileSizes<2, 8, 32, 128, 128> {};
template <> struct Tiles<8, 256, Tiling::group>  : TileSizes<1, 4, 16, 256, 128> {};
template <> struct Tiles<8,  64, Tiling::small> : TileSizes<1, 4, 32,  64,  64> {};
template <> struct Tiles<8, 128, Tiling::small> : TileSizes<1, 4, 16, 128,  64> {};
template <> struct Tiles<8, 256, Tiling::small> : TileSizes<1, 2,  8, 256,  64> {};
// clang-format on

/// How much a row's shift may lag behind its maximum, in powers of 2, before the row is rescaled. Most tiles then need
/// neither a row's maximum nor a rescaling.
inline constexpr float kShiftLag = 6;

}  // namespace anyflash::cuda
