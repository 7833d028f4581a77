// The wgmma instructions of sm_90a and nothing else. A warpgroup multiplies 64 rows. The accumulator c has N / 8
// elements, one per 8 columns, with four floats each. With g = lane / 4 and t = lane % 4, c[j] holds (g, 8j + 2t), (g,
// 8j + 2t + 1), (g + 8, 8j + 2t) and (g + 8, 8j + 2t + 1) of the warp's 16 rows. Groups complete in order.
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

/// The lower half of the descriptor of a tile with 128-byte rows in the 128-byte swizzle, groups of 8 rows one after
/// another. `panels`: bytes between panels of 64 columns, which MN-major operands need. The upper half, the same for all
/// tiles, is ANYFLASH_DESCRIPTOR's: the swizzle (1 << 30), and groups of 8 rows 1024 >> 4 apart.
__device__ __forceinline__ std::uint32_t describe_tile(const void* tile, std::uint32_t panels) {
  return panels >> 4 << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}
#define ANYFLASH_DESCRIPTOR(name, low) ".reg .b64 " name "; mov.b64 " name ", {%" #low ", 1073741888};\n"

// clang-format off
#define ANYFLASH_C8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define ANYFLASH_C_16 ANYFLASH_C8(0, 1, 2, 3, 4, 5, 6, 7) ", " ANYFLASH_C8(8, 9, 10, 11, 12, 13, 14, 15)
#define ANYFLASH_C_32 ANYFLASH_C_16 ", " ANYFLASH_C8(16, 17, 18, 19, 20, 21, 22, 23) ", " ANYFLASH_C8(24, 25, 26, 27, 28, 29, 30, 31)
#define ANYFLASH_C_64 ANYFLASH_C_32 ", " ANYFLASH_C8(32, 33, 34, 35, 36, 37, 38, 39) ", " \
  ANYFLASH_C8(40, 41, 42, 43, 44, 45, 46, 47) ", " ANYFLASH_C8(48, 49, 50, 51, 52, 53, 54, 55) ", " \
  ANYFLASH_C8(56, 57, 58, 59, 60, 61, 62, 63)
#define ANYFLASH_C_128 ANYFLASH_C_64 ", " ANYFLASH_C8(64, 65, 66, 67, 68, 69, 70, 71) ", " \
  ANYFLASH_C8(72, 73, 74, 75, 76, 77, 78, 79) ", " ANYFLASH_C8(80, 81, 82, 83, 84, 85, 86, 87) ", " \
  ANYFLASH_C8(88, 89, 90, 91, 92, 93, 94, 95) ", " ANYFLASH_C8(96, 97, 98, 99, 100, 101, 102, 103) ", " \
  ANYFLASH_C8(104, 105, 106, 107, 108, 109, 110, 111) ", " ANYFLASH_C8(112, 113, 114, 115, 116, 117, 118, 119) ", " \
  ANYFLASH_C8(120, 121, 122, 123, 124, 125, 126, 127)
#define ANYFLASH_Q(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define ANYFLASH_Q4 ANYFLASH_Q(0), ANYFLASH_Q(1), ANYFLASH_Q(2), ANYFLASH_Q(3)
#define ANYFLASH_QS(j) ANYFLASH_Q(j), ANYFLASH_Q(j + 1), ANYFLASH_Q(j + 2), ANYFLASH_Q(j + 3)
#define ANYFLASH_Q8 ANYFLASH_Q4, ANYFLASH_QS(4)
#define ANYFLASH_Q16 ANYFLASH_Q8, ANYFLASH_QS(8), ANYFLASH_QS(12)
#define ANYFLASH_Q32 ANYFLASH_Q16, ANYFLASH_QS(16), ANYFLASH_QS(20), ANYFLASH_QS(24), ANYFLASH_QS(28)
// clang-format on

/// wgmma: c (64 x N) = a (64 x 16) b (16 x N), plus the old c if `sum`. a is given by descriptor, or in registers in the
/// layout of c. In shared memory the 16 numbers of a row of `a`, or of a column of b, are contiguous (K-major), unless
/// transposed (MN-major).
#define ANYFLASH_WGMMA(E, type, n, groups, registers, i0, i1, i2, i3, i4, i5, i6)                                      \
  template <bool kTransposedA, bool kTransposedB>                                                                      \
  __device__ __forceinline__ void wgmma(float (&c)[groups][4], std::uint32_t a, std::uint32_t b, bool sum, E) {        \
    asm volatile("{ .reg .pred sum; setp.ne.b32 sum, %" #i2 ", 0;\n" ANYFLASH_DESCRIPTOR("a", i0) ANYFLASH_DESCRIPTOR( \
                     "b", i1) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                          \
                              " {" ANYFLASH_C_##registers "}, a, b, sum, 1, 1, %" #i3 ", %" #i4 "; }"                  \
                 : ANYFLASH_Q##groups                                                                                  \
                 : "r"(a), "r"(b), "r"(int(sum)), "n"(int(kTransposedA)), "n"(int(kTransposedB)));                     \
  }                                                                                                                    \
  template <bool kTransposedB>                                                                                         \
  __device__ __forceinline__ void wgmma(float (&c)[groups][4], const std::uint32_t (&a)[4], std::uint32_t b, bool sum, \
                                        E) {                                                                           \
    asm volatile("{ .reg .pred sum; setp.ne.b32 sum, %" #i5                                                            \
                 ", 0;\n" ANYFLASH_DESCRIPTOR("b", i4) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type \
                                                       " {" ANYFLASH_C_##registers                                     \
                 "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, b, sum, 1, 1, %" #i6 "; }"                              \
                 : ANYFLASH_Q##groups                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int(sum)), "n"(int(kTransposedB)));         \
  }
#define ANYFLASH_WGMMA_SIZES(E, type)                              \
  ANYFLASH_WGMMA(E, type, 32, 4, 16, 16, 17, 18, 19, 20, 21, 22)   \
  ANYFLASH_WGMMA(E, type, 64, 8, 32, 32, 33, 34, 35, 36, 37, 38)   \
  ANYFLASH_WGMMA(E, type, 128, 16, 64, 64, 65, 66, 67, 68, 69, 70) \
  ANYFLASH_WGMMA(E, type, 256, 32, 128, 128, 129, 130, 131, 132, 133, 134)
ANYFLASH_WGMMA_SIZES(__half, "f16")
ANYFLASH_WGMMA_SIZES(__nv_bfloat16, "bf16")
#undef ANYFLASH_WGMMA_SIZES
#undef ANYFLASH_WGMMA

}  // namespace anyflash::cuda
