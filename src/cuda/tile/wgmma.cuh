// The wgmma instructions of sm_90a and nothing else. A warpgroup multiplies 64 rows. The accumulator c has N / 8
// elements, one per 8 columns, with four floats each. With g = lane / 4 and t = lane % 4, c[j] holds (g, 8j + 2t), (g,
// 8j + 2t + 1), (g + 8, 8j + 2t) and (g + 8, 8j + 2t + 1) of the warp's 16 rows.
#pragma once

#include "cuda/common/instructions.cuh"

namespace anyflash::cuda {

/// Needed before wgmma reads registers that ordinary instructions have written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Waits until at most kGroups committed groups are in flight.
template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// clang-format off
#define ANYFLASH_C8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define ANYFLASH_C_32 ANYFLASH_C8(0, 1, 2, 3, 4, 5, 6, 7) ", " ANYFLASH_C8(8, 9, 10, 11, 12, 13, 14, 15) ", " \
  ANYFLASH_C8(16, 17, 18, 19, 20, 21, 22, 23) ", " ANYFLASH_C8(24, 25, 26, 27, 28, 29, 30, 31)
#define ANYFLASH_C_64 ANYFLASH_C_32 ", " ANYFLASH_C8(32, 33, 34, 35, 36, 37, 38, 39) ", " \
  ANYFLASH_C8(40, 41, 42, 43, 44, 45, 46, 47) ", " ANYFLASH_C8(48, 49, 50, 51, 52, 53, 54, 55) ", " \
  ANYFLASH_C8(56, 57, 58, 59, 60, 61, 62, 63)
#define ANYFLASH_C_128 ANYFLASH_C_64 ", " ANYFLASH_C8(64, 65, 66, 67, 68, 69, 70, 71) ", " \
  ANYFLASH_C8(72, 73, 74, 75, 76, 77, 78, 79) ", " ANYFLASH_C8(80, 81, 82, 83, 84, 85, 86, 87) ", " \
  ANYFLASH_C8(88, 89, 90, 91, 92, 93, 94, 95) ", " ANYFLASH_C8(96, 97, 98, 99, 100, 101, 102, 103) ", " \
  ANYFLASH_C8(104, 105, 106, 107, 108, 109, 110, 111) ", " ANYFLASH_C8(112, 113, 114, 115, 116, 117, 118, 119) ", " \
  ANYFLASH_C8(120, 121, 122, 123, 124, 125, 126, 127)

#define ANYFLASH_Q(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define ANYFLASH_Q4(j) ANYFLASH_Q(j), ANYFLASH_Q(j + 1), ANYFLASH_Q(j + 2), ANYFLASH_Q(j + 3)
#define ANYFLASH_Q8 ANYFLASH_Q4(0), ANYFLASH_Q4(4)
#define ANYFLASH_Q16 ANYFLASH_Q8, ANYFLASH_Q4(8), ANYFLASH_Q4(12)
#define ANYFLASH_Q32 ANYFLASH_Q16, ANYFLASH_Q4(16), ANYFLASH_Q4(20), ANYFLASH_Q4(24), ANYFLASH_Q4(28)
// clang-format on

// The upper half of a descriptor: rows of 128 bytes in the 128-byte swizzle (1 << 30), groups of 8 rows 1024 bytes
// apart.
#define ANYFLASH_WGMMA(E, type, n, groups, registers, i0, i1, i2, i3, i4, i5)                                       \
  __device__ __forceinline__ void wgmma_abt(float (&c)[groups][4], std::uint32_t a, std::uint32_t b, bool sum, E) { \
    asm volatile("{ .reg .pred sum; .reg .b64 a, b; setp.ne.b32 sum, %" #i2                                         \
                 ", 0;\n"                                                                                           \
                 "mov.b64 a, {%" #i0 ", 1073741888}; mov.b64 b, {%" #i1                                             \
                 ", 1073741888};\n"                                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" ANYFLASH_C_##registers        \
                 "}, a, b, sum, 1, 1, 0, 0; }"                                                                      \
                 : ANYFLASH_Q##groups                                                                               \
                 : "r"(a), "r"(b), "r"(int(sum)));                                                                  \
  }                                                                                                                 \
  __device__ __forceinline__ void wgmma_ab(float (&c)[groups][4], const std::uint32_t (&a)[4], std::uint32_t b,     \
                                           bool sum, E) {                                                           \
    asm volatile("{ .reg .pred sum; .reg .b64 b; setp.ne.b32 sum, %" #i5                                            \
                 ", 0;\n"                                                                                           \
                 "mov.b64 b, {%" #i4                                                                                \
                 ", 1073741888};\n"                                                                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" ANYFLASH_C_##registers        \
                 "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, b, sum, 1, 1, 1; }"                                  \
                 : ANYFLASH_Q##groups                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int(sum)));                              \
  }
#define ANYFLASH_WGMMA_SIZES(E, type)                          \
  ANYFLASH_WGMMA(E, type, 64, 8, 32, 32, 33, 34, 35, 36, 37)   \
  ANYFLASH_WGMMA(E, type, 128, 16, 64, 64, 65, 66, 67, 68, 69) \
  ANYFLASH_WGMMA(E, type, 256, 32, 128, 128, 129, 130, 131, 132, 133)
/// wgmma_abt: c (64 x N) = a (64 x 16) b^T (N x 16), plus c if `sum`; both by descriptor, K-major.
/// wgmma_ab: c (64 x N) = a (64 x 16) b (16 x N), plus c if `sum`; a in registers, b by descriptor, MN-major.
ANYFLASH_WGMMA_SIZES(__half, "f16")
ANYFLASH_WGMMA_SIZES(__nv_bfloat16, "bf16")
#undef ANYFLASH_WGMMA_SIZES
#undef ANYFLASH_WGMMA

}  // namespace anyflash::cuda
