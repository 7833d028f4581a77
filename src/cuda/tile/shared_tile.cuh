// A tile of 16-bit numbers in shared memory, in the layout that TMA writes and wgmma reads: panels of 64 columns, with
// rows of 128 bytes in the 128-byte swizzle.
#pragma once

#include "cuda/tile/barriers.cuh"
#include "cuda/tile/wgmma.cuh"

namespace anyflash::cuda {

template <class E, int kRows_, int kCols_>
struct alignas(1024) SharedTile {
  static constexpr int kRows = kRows_, kCols = kCols_, kPanels = kCols / 64;
  static constexpr int kPanelBytes = kRows * 128, kBytes = kPanels * kPanelBytes;
  static_assert(kCols % 64 == 0 && kRows % 8 == 0, "swizzled panels have 64 columns and groups of 8 rows");

  E data[kRows * kCols];

  /// The lower half of the wgmma descriptor of the whole tile, K-major or MN-major. The leading byte offset is the
  /// distance between panels: MN-major operands of more than 64 columns use it, K-major ones do not.
  __device__ __forceinline__ std::uint32_t descriptor() const { return describe_tile(data, kPanelBytes); }
  /// The offset to add to it for columns c .. c + 15 of a K-major operand, and for rows r .. r + 15 of an MN-major one.
  __device__ static constexpr std::uint32_t columns(int c) { return (c / 64 * kPanelBytes + c % 64 * 2) / 16; }
  __device__ static constexpr std::uint32_t rows(int r) { return r * 128 / 16; }
};

}  // namespace anyflash::cuda
