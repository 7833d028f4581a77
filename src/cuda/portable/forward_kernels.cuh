// A forward kernel, and the table of those of one element type. The small tiles are not compiled for sm_90, which has
// room for the large ones, nor these for sm_75, which has not.
#pragma once

#include "cuda/portable/forward.cuh"
#include "cuda/portable/forward_kernels.h"

namespace anyflash::cuda {

#if defined(ANYFLASH_CUDA_SMALL_TILES)  // to test them on a GPU that would take the others
inline constexpr bool kLargeOffered = false, kSmallOffered = true;
#elif defined(__CUDA_ARCH__)
inline constexpr bool kLargeOffered = __CUDA_ARCH__ >= 800, kSmallOffered = __CUDA_ARCH__ < 900;
#else
inline constexpr bool kLargeOffered = true, kSmallOffered = true;
#endif

template <class E, int kDepth, bool kLarge, bool kGeneral>
__global__ void __launch_bounds__(Tiles<sizeof(E), kDepth, kLarge>::kThreads,
                                  Tiles<sizeof(E), kDepth, kLarge>::kBlocksPerMultiprocessor)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  if constexpr (kLarge ? kLargeOffered : kSmallOffered) {
    using Block = ForwardBlock<E, Tiles<sizeof(E), kDepth, kLarge>, kGeneral>;
    extern __shared__ __align__(1024) char memory[];
    Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run();
  }
}

template <class E, int kDepth, bool kLarge, bool kGeneral>
ForwardKernel forward_kernel_of() {
  using Sizes = Tiles<sizeof(E), kDepth, kLarge>;
  using Shared = typename ForwardBlock<E, Sizes, kGeneral>::Shared;
  static_assert(kLarge || sizeof(Shared) <= 64 << 10, "small tiles are for 64 KB of shared memory");
  return {reinterpret_cast<const void*>(&forward_kernel<E, kDepth, kLarge, kGeneral>), Sizes::kRows, Sizes::kValues,
          Sizes::kThreads, static_cast<int>(sizeof(Shared))};
}

template <class E, int kDepth>
ForwardKernel forward_kernel_of(ForwardKind kind) {
  if (!kind.large) return forward_kernel_of<E, kDepth, false, true>();
  return kind.general ? forward_kernel_of<E, kDepth, true, true>() : forward_kernel_of<E, kDepth, true, false>();
}

template <class E>
ForwardKernel forward_kernel_of(ForwardKind kind) {
  if (kind.depth == 64) return forward_kernel_of<E, 64>(kind);
  return kind.depth == 128 ? forward_kernel_of<E, 128>(kind) : forward_kernel_of<E, 256>(kind);
}

}  // namespace anyflash::cuda
