// Products of a warpgroup (wgmma, sm_90a): four warps multiply 64 rows, operands come from shared memory by descriptor
// or, A, from registers. A lane's numbers of a 64 x N result are those of N / 8 results of mma.m16n8 for the warp's 16
// rows: c01 those of row g, c23 those of row g + 8. The instructions are issued here and complete at products_wait.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/common/instructions.cuh"
#include "cuda/hopper/register_lists.h"

namespace anyflash::cuda {

/// Describes a tile in shared memory whose rows of 128 bytes are swizzled, groups of 8 rows one behind the other;
/// `panels`: bytes between its panels of 64 columns (for operands that are read along their rows).
__device__ __forceinline__ std::uint64_t describe_tile(const void* tile, std::uint32_t panels) {
  constexpr std::uint64_t swizzle_128 = std::uint64_t{1} << 62, group = std::uint64_t{1024 >> 4} << 32;
  return swizzle_128 | group | std::uint64_t{panels >> 4} << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

/// Before products that read registers which ordinary instructions have written.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

/// Makes what this thread has written to shared memory visible to the products of all threads behind the next barrier.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// c (64 x N) = a (64 x 16) b (16 x N), added to what c was if `sum`: a and b by descriptor, b's columns being rows in
// shared memory (K); or a in registers, b's rows being rows in shared memory (V).

#define ANYFLASH_RESULT(j) "+f"(c01[j][0]), "+f"(c01[j][1]), "+f"(c23[j][0]), "+f"(c23[j][1])

#define ANYFLASH_PRODUCTS_OF_KEYS(E, type)                                                                            \
  __device__ __forceinline__ void multiply_group(float (&c01)[8][2], float (&c23)[8][2], std::uint64_t a,             \
                                                 std::uint64_t b, bool sum, E) {                                      \
    asm volatile("{ .reg .pred sum; setp.ne.b32 sum, %34, 0;\n"                                                       \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" ANYFLASH_REGISTERS_32 "}, "         \
                 "%32, %33, sum, 1, 1, 0, 0; }"                                                                       \
                 : ANYFLASH_TIMES_8(ANYFLASH_RESULT, 0)                                                               \
                 : "l"(a), "l"(b), "r"(int(sum)));                                                                    \
  }
ANYFLASH_PRODUCTS_OF_KEYS(__half, "f16")
ANYFLASH_PRODUCTS_OF_KEYS(__nv_bfloat16, "bf16")
#undef ANYFLASH_PRODUCTS_OF_KEYS

// tiles: of 8 columns. registers: 4 a tile; behind those of the results come a's, b's and sum's.
#define ANYFLASH_PRODUCTS_OF_VALUES(E, type, tiles, columns, registers, a_text, b_text, sum_text)                     \
  __device__ __forceinline__ void multiply_group(float (&c01)[tiles][2], float (&c23)[tiles][2],                      \
                                                 const std::uint32_t (&a)[4], std::uint64_t b, bool sum, E) {         \
    asm volatile("{ .reg .pred sum; setp.ne.b32 sum, " sum_text ", 0;\n"                                              \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type                                 \
                 " {" ANYFLASH_REGISTERS_##registers "}, "                                                            \
                 "{" a_text "}, " b_text ", sum, 1, 1, 1; }"                                                          \
                 : ANYFLASH_TIMES_##tiles(ANYFLASH_RESULT, 0)                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(sum)));                                \
  }
#define ANYFLASH_PRODUCTS_OF_ALL_VALUES(E, type)                                                                      \
  ANYFLASH_PRODUCTS_OF_VALUES(E, type, 8, "64", 32, "%32, %33, %34, %35", "%36", "%37")                               \
  ANYFLASH_PRODUCTS_OF_VALUES(E, type, 16, "128", 64, "%64, %65, %66, %67", "%68", "%69")                             \
  ANYFLASH_PRODUCTS_OF_VALUES(E, type, 32, "256", 128, "%128, %129, %130, %131", "%132", "%133")
ANYFLASH_PRODUCTS_OF_ALL_VALUES(__half, "f16")
ANYFLASH_PRODUCTS_OF_ALL_VALUES(__nv_bfloat16, "bf16")
#undef ANYFLASH_PRODUCTS_OF_ALL_VALUES
#undef ANYFLASH_PRODUCTS_OF_VALUES
#undef ANYFLASH_RESULT

}  // namespace anyflash::cuda
