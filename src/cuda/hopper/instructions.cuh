// Products of a warpgroup (wgmma, sm_90a): four warps multiply 64 rows, operands come from shared memory by descriptor
// or, A, from registers. A lane's numbers of a 64 x N result are those of N / 8 results of mma.m16n8 for the warp's 16
// rows: c01 those of row g, c23 those of row g + 8. The instructions are issued here and complete at products_wait.
#pragma once

#include <cstdint>

#include "cuda/common/instructions.cuh"

namespace anyflash::cuda {

/// Describes a tile in shared memory whose rows of 128 bytes are swizzled, groups of 8 rows one behind the other;
/// `panels`: bytes between its panels of 64 columns (for operands that are read along their rows). This is the lower
/// half of the descriptor: the upper one says the above of all tiles, in ANYFLASH_DESCRIPTOR.
__device__ __forceinline__ std::uint32_t describe_tile(const void* tile, std::uint32_t panels) {
  return panels >> 4 << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

/// In an instruction's text: `name` becomes the descriptor with the lower half `low`. Above it: 128 bytes are swizzled
/// (1 << 30), a group is 1024 >> 4.
#define ANYFLASH_DESCRIPTOR(name, low) ".reg .b64 " name "; mov.b64 " name ", {" low ", 1073741888};\n"

/// Before products that read registers which ordinary instructions have written.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

/// Makes what this thread has written to shared memory visible to the products of all threads behind the next barrier.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace anyflash::cuda
