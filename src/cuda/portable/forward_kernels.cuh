// A forward kernel, and the table of those of one element type. Each GPU's machine code holds only the tilings that can
// be asked for on it.
#pragma once

#include "cuda/portable/forward.cuh"
#include "cuda/portable/forward_kernels.h"

namespace anyflash::cuda {

/// Can the GPU that is compiled for be asked for this tiling?
template <class E, int kDepth>
__host__ __device__ constexpr bool offered(Tiling tiling) {
#if defined(ANYFLASH_CUDA_SMALL_TILES)  // to test these tiles on a GPU that would use others
  return tiling == Tiling::small;
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return tiling == Tiling::group;
#elif defined(__CUDA_ARCH__)
  using Large = ForwardBlock<E, Tiles<sizeof(E), kDepth, Tiling::large>, true>;
  return tiling_fits<sizeof(typename Large::Shared)>(tiling);
#else
  return true;
#endif
}

template <class E, int kDepth, Tiling tiling, bool kGeneral>
__global__ void __launch_bounds__(Tiles<sizeof(E), kDepth, tiling>::kThreads,
                                  Tiles<sizeof(E), kDepth, tiling>::kBlocksPerMultiprocessor)
    forward_kernel(const __grid_constant__ ForwardArgs args) {
  if constexpr (offered<E, kDepth>(tiling)) {
    wait_for_kernel_before();
    if (args.only_if && !*args.only_if) return;
    using Block = ForwardBlock<E, Tiles<sizeof(E), kDepth, tiling>, kGeneral>;
    extern __shared__ __align__(1024) char memory[];
    // unsigned: int could overflow beyond the last task.
    for (auto task = blockIdx.x; task < static_cast<unsigned>(args.tasks); task += gridDim.x) {
      if (!is_wanted(args, static_cast<std::int32_t>(task))) continue;
      Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run(static_cast<std::int32_t>(task));
      __syncthreads();  // the last task's shared memory is about to be overwritten
    }
    if (args.only_if) clear_counters(args.only_if);
  } else {
    __trap();  // never launched: the host asks only for kernels that the GPU has
  }
}

template <class E, int kDepth, Tiling tiling, bool kGeneral>
ForwardKernel forward_kernel_of() {
  using Sizes = Tiles<sizeof(E), kDepth, tiling>;
  using Shared = typename ForwardBlock<E, Sizes, kGeneral>::Shared;
  static_assert(tiling != Tiling::small || sizeof(Shared) <= 64 << 10, "small tiles are for 64 KB of shared memory");
  return {reinterpret_cast<const void*>(&forward_kernel<E, kDepth, tiling, kGeneral>), Sizes::kRows, Sizes::kValues,
          Sizes::kThreads, static_cast<int>(sizeof(Shared))};
}

template <class E, int kDepth, Tiling tiling>
ForwardKernel forward_kernel_of(bool general) {
  return general ? forward_kernel_of<E, kDepth, tiling, true>() : forward_kernel_of<E, kDepth, tiling, false>();
}

template <class E, int kDepth>
ForwardKernel forward_kernel_of(ForwardKind kind) {
  if (kind.tiling == Tiling::small) return forward_kernel_of<E, kDepth, Tiling::small, true>();
  if (kind.tiling == Tiling::group) return forward_kernel_of<E, kDepth, Tiling::group>(kind.general);
  if constexpr (std::is_same_v<E, float>) {
    static_assert(Tiles<4, kDepth, Tiling::tf32>::kRows == Tiles<4, kDepth, Tiling::large>::kRows, "of the same plan");
    if (kind.tiling == Tiling::tf32) return forward_kernel_of<E, kDepth, Tiling::tf32>(kind.general);
  }
  return forward_kernel_of<E, kDepth, Tiling::large>(kind.general);
}

template <class E>
ForwardKernel forward_kernel_of(ForwardKind kind) {
  if (kind.depth == 64) return forward_kernel_of<E, 64>(kind);
  return kind.depth == 128 ? forward_kernel_of<E, 128>(kind) : forward_kernel_of<E, 256>(kind);
}

}  // namespace anyflash::cuda
