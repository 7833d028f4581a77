// Products of a warpgroup (wgmma, sm_90a): four warps multiply 64 rows. Operands are in shared memory, by descriptor,
// or, for A, in registers. A lane's numbers of a 64 x N result are those of N / 8 results of mma.m16n8 for the warp's
// 16 rows: c01 of row g, c23 of row g + 8. The instructions are issued here and complete at products_wait.
#pragma once

#include <cstdint>

#include "cuda/tile/wgmma.cuh"

namespace anyflash::cuda {

/// The lower half of the wgmma descriptor of a tile with 128-byte rows, swizzled, and groups of 8 rows one after
/// another. `panels`: bytes between panels of 64 columns (for MN-major operands). The upper half, the same for all
/// tiles, is in ANYFLASH_DESCRIPTOR.
__device__ __forceinline__ std::uint32_t describe_tile(const void* tile, std::uint32_t panels) {
  return panels >> 4 << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

/// PTX text that sets `name` to the descriptor with the lower half `low`. In the upper half: 128-byte swizzle (1 <<
/// 30), groups of 8 rows 1024 >> 4 apart.
#define ANYFLASH_DESCRIPTOR(name, low) ".reg .b64 " name "; mov.b64 " name ", {" low ", 1073741888};\n"

/// fence.proxy.async: makes this thread's writes to shared memory visible to the products of all threads after the next
/// barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace anyflash::cuda
