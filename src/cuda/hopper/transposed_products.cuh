// Products of a warpgroup (wgmma, sm_90a) for the backward pass, where any operand may be transposed. In a 64 x 8
// kTiles result a lane has these numbers: c[j][0] and c[j][1] are columns 8j + 2t and 8j + 2t + 1 of row g of its
// warp's 16, c[j][2] and c[j][3] those of row g + 8. The instructions are issued here. They complete in order, by
// committed groups.
#pragma once

#include "cuda/hopper/instructions.cuh"
#include "cuda/hopper/register_lists.h"

namespace anyflash::cuda {

/// Ties registers to this place: after a wait, the results that products have written; before it, the operands that
/// they read.
template <int kTiles>
__device__ __forceinline__ void keep(float (&c)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
    asm volatile("" : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])::"memory");
}

// c (64 x 8 kTiles) = a (64 x 16) b (16 x 8 kTiles), added to the old c if `sum`. a is given by descriptor, or in
// registers in the layout of products' results. In shared memory the 16 numbers of a row of `a`, or of a column of b,
// are contiguous, unless transposed.

#define ANYFLASH_RESULT(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])

// tiles: of 8 columns. registers: 4 per tile; the other operands follow those of the results, named by their texts.
#define ANYFLASH_PRODUCTS(E, type, tiles, columns, registers, a_text, b_text, sum_text, ways)                     \
  template <bool kTransposedA, bool kTransposedB>                                                                 \
  __device__ __forceinline__ void multiply(float (&c)[tiles][4], std::uint32_t a, std::uint32_t b, bool sum, E) { \
    asm volatile("{ .reg .pred sum; setp.ne.b32 sum, " sum_text ", 0;\n" ANYFLASH_DESCRIPTOR("a", a_text)         \
                     ANYFLASH_DESCRIPTOR("b", b_text) "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type \
                                                      "." type " {" ANYFLASH_REGISTERS_##registers                \
                 "}, a, b, sum, 1, 1, " ways "; }"                                                                \
                 : ANYFLASH_TIMES_##tiles(ANYFLASH_RESULT, 0)                                                     \
                 : "r"(a), "r"(b), "r"(int(sum)), "n"(int(kTransposedA)), "n"(int(kTransposedB)));                \
  }
#define ANYFLASH_PRODUCTS_OF_REGISTERS(E, type, tiles, columns, registers, a_text, b_text, sum_text, way)         \
  template <bool kTransposedB>                                                                                    \
  __device__ __forceinline__ void multiply(float (&c)[tiles][4], const std::uint32_t (&a)[4], std::uint32_t b,    \
                                           bool sum, E) {                                                         \
    asm volatile("{ .reg .pred sum; setp.ne.b32 sum, " sum_text ", 0;\n" ANYFLASH_DESCRIPTOR(                     \
                     "b", b_text) "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type            \
                                  " {" ANYFLASH_REGISTERS_##registers "}, {" a_text "}, b, sum, 1, 1, " way "; }" \
                 : ANYFLASH_TIMES_##tiles(ANYFLASH_RESULT, 0)                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int(sum)), "n"(int(kTransposedB)));    \
  }
#define ANYFLASH_ALL_PRODUCTS(E, type)                                                            \
  ANYFLASH_PRODUCTS(E, type, 4, "32", 16, "%16", "%17", "%18", "%19, %20")                        \
  ANYFLASH_PRODUCTS(E, type, 8, "64", 32, "%32", "%33", "%34", "%35, %36")                        \
  ANYFLASH_PRODUCTS(E, type, 16, "128", 64, "%64", "%65", "%66", "%67, %68")                      \
  ANYFLASH_PRODUCTS_OF_REGISTERS(E, type, 8, "64", 32, "%32, %33, %34, %35", "%36", "%37", "%38") \
  ANYFLASH_PRODUCTS_OF_REGISTERS(E, type, 16, "128", 64, "%64, %65, %66, %67", "%68", "%69", "%70")
ANYFLASH_ALL_PRODUCTS(__half, "f16")
ANYFLASH_ALL_PRODUCTS(__nv_bfloat16, "bf16")
#undef ANYFLASH_ALL_PRODUCTS
#undef ANYFLASH_PRODUCTS_OF_REGISTERS
#undef ANYFLASH_PRODUCTS
#undef ANYFLASH_RESULT

/// stmatrix: four 8 x 8 matrices of 16-bit numbers to shared memory, from registers as load_matrices fills them.
__device__ __forceinline__ void store_matrices(void* row, const std::uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

/// The same, each matrix transposed.
__device__ __forceinline__ void store_matrices_transposed(void* row, const std::uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

/// Adds four neighbouring numbers to those in global memory, each atomically, in no fixed order.
__device__ __forceinline__ void add_to_memory(float* to, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}

}  // namespace anyflash::cuda
