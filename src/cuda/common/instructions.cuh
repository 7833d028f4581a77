// Instructions that CUDA C++ has no name for, each in a function of its own. Fragments have the layout of the PTX
// manual (sections "mma" and "ldmatrix"). With g = lane / 4 and t = lane % 4, a lane has (g, 2t), (g, 2t + 1), (g + 8,
// 2t) and (g + 8, 2t + 1) of a 16 x 8 result.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace anyflash::cuda {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ unsigned lane_number() { return threadIdx.x % 32; }

/// Two numbers, rounded to 16 bits, a in the lower half.
__device__ __forceinline__ std::uint32_t packed_pair(float a, float b, __half) {
  const __half2 pair = __floats2half2_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ __forceinline__ std::uint32_t packed_pair(float a, float b, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

/// The same, but numbers that are too large become the largest finite number; from sm_80 up.
__device__ __forceinline__ std::uint32_t clamped_pair(float a, float b, __half) {
  std::uint32_t pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}
__device__ __forceinline__ std::uint32_t clamped_pair(float a, float b, __nv_bfloat16) {
  std::uint32_t pair;
  asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  return pair;
}

/// Copies 16 bytes from global to shared memory. On sm_80+ (cp.async) they have arrived only after copies_wait.
__device__ __forceinline__ void copy_16(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#else
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}

/// 8 bytes.
__device__ __forceinline__ void copy_8(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(to)), "l"(from) : "memory");
#else
  *static_cast<std::uint64_t*>(to) = *static_cast<const std::uint64_t*>(from);
#endif
}

/// Copies 16 bytes, of which the first `bytes` are read and the others become 0. Costs more instructions.
__device__ __forceinline__ void copy_16(void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
#else
  uint4 x = {0, 0, 0, 0};
  if (bytes == 16) {
    x = *static_cast<const uint4*>(from);
  } else {
    auto* const words = reinterpret_cast<std::uint16_t*>(&x);
    for (int i = 0; i < 8; ++i)
      if (2 * i < bytes) words[i] = static_cast<const std::uint16_t*>(from)[i];
  }
  *static_cast<uint4*>(to) = x;
#endif
}

/// Commits a group of copies.
__device__ __forceinline__ void copies_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits until at most `kGroups` of the calling thread's committed groups are in flight.
template <int kGroups>
__device__ __forceinline__ void copies_wait() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

/// Programmatic dependent launch: waits until the kernel before this one is done.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Programmatic dependent launch: lets the next kernel begin once every thread block has called this.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// ldmatrix: four 8 x 8 matrices of 16-bit numbers; lane i passes the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row)));
}

/// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row)));
}

/// An 8 x 8 matrix of 16-bit numbers over a warp, transposed; a lane has numbers 2 (lane % 4) and the next of row lane
/// / 4.
__device__ __forceinline__ std::uint32_t transposed_matrix(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

/// c (16 x 8) += a (16 x 16) b (16 x 8), float16. c01: the lane's numbers of row g, c23: of row g + 8.
__device__ __forceinline__ void multiply_16(float (&c01)[2], float (&c23)[2], const std::uint32_t (&a)[4],
                                            std::uint32_t b0, std::uint32_t b1, __half) {
#if __CUDA_ARCH__ >= 800
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c01[0]), "+f"(c01[1]), "+f"(c23[0]), "+f"(c23[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c01[0]), "+f"(c01[1]), "+f"(c23[0]), "+f"(c23[1])
               : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c01[0]), "+f"(c01[1]), "+f"(c23[0]), "+f"(c23[1])
               : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

#if __CUDA_ARCH__ >= 800 || !defined(__CUDA_ARCH__)

/// The same of bfloat16.
__device__ __forceinline__ void multiply_16(float (&c01)[2], float (&c23)[2], const std::uint32_t (&a)[4],
                                            std::uint32_t b0, std::uint32_t b1, __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c01[0]), "+f"(c01[1]), "+f"(c23[0]), "+f"(c23[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// c (16 x 8) += a (16 x 8) b (8 x 8), TF32.
__device__ __forceinline__ void multiply_8(float (&c01)[2], float (&c23)[2], const std::uint32_t (&a)[4],
                                           std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c01[0]), "+f"(c01[1]), "+f"(c23[0]), "+f"(c23[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// x rounded to the nearest TF32.
__device__ __forceinline__ std::uint32_t to_tf32(float x) {
  std::uint32_t nearest;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(nearest) : "f"(x));
  return nearest;
}

/// c (8 x 8) += a (8 x 4) b (4 x 8), float64.
__device__ __forceinline__ void multiply_64(double (&c)[2], double a, double b) {
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
               : "+d"(c[0]), "+d"(c[1])
               : "d"(a), "d"(b));
}

#if __CUDA_ARCH__ >= 900

/// c (16 x 8) += a (16 x 16) b (16 x 8), float64: Hopper runs it at twice the rate of the one above.
__device__ __forceinline__ void multiply_64(double (&c01)[2], double (&c23)[2], const double (&a)[8],
                                            const double (&b)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7, %8, %9, %10, %11}, "
      "{%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(c01[0]), "+d"(c01[1]), "+d"(c23[0]), "+d"(c23[1])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]), "d"(b[0]), "d"(b[1]),
        "d"(b[2]), "d"(b[3]));
}

#endif

#endif

/// 2^x to about 2 units in the last place; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approximately(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace anyflash::cuda
