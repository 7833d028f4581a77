// Instructions that CUDA C++ has no name for: a verb for each. Rungs with tensor cores use them.
//
// Here are the bodies for a GPU, in PTX. emulator_ptx.h has the same verbs for the CPU, as loops that can be read.
#pragma once

#include "device.h"

#ifdef __CUDACC__
#include <cuda.h>  // CUtensorMap

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return std::uint32_t(__cvta_generic_to_shared(pointer));
}

// Two numbers, rounded, the first in the lower half.
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

__device__ __forceinline__ float unpack(std::uint32_t pair, int n) {
  return __half2float(__ushort_as_half(std::uint16_t(pair >> 16 * n)));
}

// --- Tensor cores of one warp (sm_80) --------------------------------------------------------------------------------

// c (16 x 8) += a (16 x 16) b (16 x 8). With g = lane / 4 and t = lane % 4 a lane has
//   c: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
//   a: pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with its right neighbour
//   b: pairs (2t, g), (2t + 8, g), each with its lower neighbour
__device__ __forceinline__ void mma(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices. Lane i passes the address of row i % 8 of matrix i / 8, and gets the pair (g, 2t) of each.
__device__ __forceinline__ void ldmatrix(std::uint32_t (&to)[4], const half* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
// Each matrix transposed: the lane gets (2t, g) and (2t + 1, g).
__device__ __forceinline__ void ldmatrix_trans(std::uint32_t (&to)[4], const half* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// --- Asynchronous copies of a thread (sm_80) -------------------------------------------------------------------------

// 16 bytes from global to shared memory; zeros if not `inside`. They are there after copies_wait.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(inside ? 16 : 0)
               : "memory");
}
// Ends a group of copies.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most so many of this thread's groups are on their way.
template <int groups>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// --- Barriers --------------------------------------------------------------------------------------------------------

// Barrier `id` of 16, __syncthreads is 0: `threads` threads come; those that sync wait, those that arrive go on.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// An mbarrier (sm_90). A phase ends when `count` threads have arrived and all announced bytes are there. Phases count
// 0, 1, 0, 1; wait(parity) waits for the end of the phase of that parity.
struct Barrier {
  std::uint64_t state;
  __device__ __forceinline__ void init(int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(count) : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // Arrives, and announces bytes that TMA will bring.
  __device__ __forceinline__ void arrive_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void wait(int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};

// After init, before other threads or TMA use a barrier.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Between ordinary writes to shared memory and wgmma or TMA that read them.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- TMA (sm_90) -----------------------------------------------------------------------------------------------------

// A box of a tensor (heads, rows, channels): 64 channels from `channel`, rows from `row`, of one head. Its rows are 128
// bytes, swizzled; those beyond the tensor are zeros. One thread asks; the bytes arrive at the barrier.
__device__ __forceinline__ void tma_load(half* to, const CUtensorMap& map, Barrier& full, int channel, int row,
                                         int head) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&full)), "r"(channel), "r"(row), "r"(head)
      : "memory");
}

// A row of bytes, without a tensor: a multiple of 16, from a multiple of 16.
__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes, Barrier& full) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&full))
               : "memory");
}
// Adds `count` float32 of shared memory to those of global memory, in the L2 cache. Ends a group.
__device__ __forceinline__ void bulk_add(float* to, const float* from, int count) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(4 * count)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until this thread's groups have been read from shared memory.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// The map of a tensor for tma_load, with boxes of `box_rows` rows.
inline CUtensorMap tensor_map(const half* data, int heads, int rows, int channels, int box_rows) {
  static void* const function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    return found;
  }();
  const cuuint64_t sizes[3] = {cuuint64_t(channels), cuuint64_t(rows ? rows : 1), cuuint64_t(heads)};
  const cuuint64_t strides[2] = {2 * sizes[0], 2 * sizes[0] * sizes[1]};
  const cuuint32_t box[3] = {64, cuuint32_t(box_rows), 1}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  const CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, const_cast<half*>(data), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) check(cudaErrorInvalidValue);
  return map;
}

// --- Tensor cores of a warpgroup (sm_90a) ----------------------------------------------------------------------------

// An operand in shared memory: rows of 128 bytes, swizzled, groups of 8 rows 1024 bytes apart. `panels`: bytes between
// panels of 64 columns, for operands of wgmma_ab.
__device__ __forceinline__ std::uint64_t descriptor(const half* tile, int panels) {
  const std::uint64_t swizzle_128 = std::uint64_t(1) << 62, groups = std::uint64_t(1024 >> 4) << 32;
  return swizzle_128 | groups | std::uint64_t(panels >> 4) << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// clang-format off
#define C4(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define C16(j) C4(j), C4(j + 1), C4(j + 2), C4(j + 3)
#define N8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define N32 N8(0, 1, 2, 3, 4, 5, 6, 7) ", " N8(8, 9, 10, 11, 12, 13, 14, 15) ", " \
            N8(16, 17, 18, 19, 20, 21, 22, 23) ", " N8(24, 25, 26, 27, 28, 29, 30, 31)
#define N64 N32 ", " N8(32, 33, 34, 35, 36, 37, 38, 39) ", " N8(40, 41, 42, 43, 44, 45, 46, 47) ", " \
            N8(48, 49, 50, 51, 52, 53, 54, 55) ", " N8(56, 57, 58, 59, 60, 61, 62, 63)

// Until at most so many groups are on their way. What they have added to c is there then: the compiler must not read c
// before, so it is told that c changes here.
template <int groups>
__device__ __forceinline__ void wgmma_wait(float (&c)[8][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : C16(0), C16(4) : "n"(groups) : "memory");
}
template <int groups>
__device__ __forceinline__ void wgmma_wait(float (&c)[16][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : C16(0), C16(4), C16(8), C16(12) : "n"(groups) : "memory");
}

// wgmma_abt: c (64 x N) = a (64 x 16) b^T (N x 16), plus c if `sum`; both operands by descriptor.
// wgmma_atb: c (64 x N) = a^T (16 x 64) b (16 x N), likewise.
// wgmma_ab: c (64 x N) = a (64 x 16) b (16 x N), plus c if `sum`; a in registers, as mma's, 16 rows a warp.
// N is 64 or 128. Of c a lane has c[j] = its four numbers of the columns 8 j to 8 j + 7, as mma's.
#define WGMMA(n, tiles, registers, outputs, i0, i1, i2, i3, i4, i5)                                                    \
  __device__ __forceinline__ void wgmma_abt(float (&c)[tiles][4], std::uint64_t a, std::uint64_t b, bool sum) {             \
    asm volatile("{ .reg .pred sum; setp.ne.b32 sum, %" #i2 ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" registers "}, %" #i0 ", %" #i1             \
                 ", sum, 1, 1, 0, 0; }" : outputs : "l"(a), "l"(b), "r"(int(sum)));                                    \
  }                                                                                                                    \
  __device__ __forceinline__ void wgmma_atb(float (&c)[tiles][4], std::uint64_t a, std::uint64_t b, bool sum) {             \
    asm volatile("{ .reg .pred sum; setp.ne.b32 sum, %" #i2 ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" registers "}, %" #i0 ", %" #i1             \
                 ", sum, 1, 1, 1, 1; }" : outputs : "l"(a), "l"(b), "r"(int(sum)));                                    \
  }                                                                                                                    \
  __device__ __forceinline__ void wgmma_ab(float (&c)[tiles][4], const std::uint32_t (&a)[4], std::uint64_t b,         \
                                           bool sum) {                                                                 \
    asm volatile("{ .reg .pred sum; setp.ne.b32 sum, %" #i5 ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" registers "}, {%" #i0 ", %" #i1 ", %" #i2  \
                 ", %" #i3 "}, %" #i4 ", sum, 1, 1, 1; }"                                                              \
                 : outputs : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(sum)));                       \
  }
#define COMMA ,
WGMMA(64, 8, N32, C16(0) COMMA C16(4), 32, 33, 34, 35, 36, 37)
WGMMA(128, 16, N64, C16(0) COMMA C16(4) COMMA C16(8) COMMA C16(12), 64, 65, 66, 67, 68, 69)
// clang-format on
#undef C4
#undef C16
#undef N8
#undef N32
#undef N64
#undef WGMMA
#undef COMMA

// How many registers a thread of this warpgroup has from now on, a multiple of 8.
template <int registers>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
#endif

// Rows of d numbers, as TMA writes and wgmma reads them: panels of 64 columns, 128 bytes a row, swizzled. Its place in
// shared memory is a multiple of 1024 bytes.
template <int rows, int d>
struct TmaTile {
  static constexpr int kBytes = rows * d * 2, kPanel = rows * 128;
  // Where a row of a panel begins, and 16-byte steps in it before the swizzle: what descriptors are made of.
  __device__ __forceinline__ half* at(int row, int column) {
    return numbers + column / 64 * rows * 64 + row * 64 + column % 64;
  }
  // Where a number lies: bits 4 to 6 of its address are exchanged by the row's last three.
  __device__ __forceinline__ half* place(int row, int column) {
    return at(row, column / 64 * 64) + (column % 64 / 8 ^ row % 8) * 8 + column % 8;
  }
  // One thread asks TMA for rows of a head.
  __device__ __forceinline__ void load(const CUtensorMap& map, Barrier& full, int row, int head) {
    for (int column = 0; column < d; column += 64) tma_load(at(0, column), map, full, column, row, head);
  }
  half numbers[rows * d];
};
