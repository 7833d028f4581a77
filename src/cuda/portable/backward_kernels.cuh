// The backward kernels, and the table of those of one element type.
#pragma once

#include "cuda/portable/backward.cuh"
#include "cuda/portable/backward_kernels.h"
#include "cuda/portable/backward_lse_remainders.cuh"
#include "cuda/portable/backward_rows.cuh"

namespace anyflash::cuda {

/// Can the GPU that is compiled for be asked for this tiling?
template <class E, int kDepth>
__host__ __device__ constexpr bool offered_backward(Tiling tiling) {
#if defined(ANYFLASH_CUDA_SMALL_TILES)  // to test these tiles on a GPU that would use others
  return tiling == Tiling::small;
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return tiling == Tiling::large;
#elif defined(__CUDA_ARCH__)
  using Large = GradientBlock<E, GradientTiles<sizeof(E), kDepth, Tiling::large>>;
  return tiling_fits<sizeof(typename Large::Shared)>(tiling);
#else
  return true;
#endif
}

template <class E, int kDepth, Tiling tiling>
__global__ void __launch_bounds__(GradientTiles<sizeof(E), kDepth, tiling>::kThreads)
    terms_kernel(const __grid_constant__ BackwardArgs args) {
  if constexpr (offered_backward<E, kDepth>(tiling)) {
    using Block = RowTermsBlock<E, GradientTiles<sizeof(E), kDepth, tiling>>;
    extern __shared__ __align__(1024) char memory[];
    Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run();
  } else {
    __trap();  // never launched: the host asks only for kernels that the GPU has
  }
}

template <class E, int kDepth, Tiling tiling>
__global__ void __launch_bounds__(GradientTiles<sizeof(E), kDepth, tiling>::kThreads,
                                  GradientTiles<sizeof(E), kDepth, tiling>::kBlocksPerMultiprocessor)
    gradients_kernel(const __grid_constant__ BackwardArgs args) {
  if constexpr (offered_backward<E, kDepth>(tiling)) {
    if (args.only_if && !*args.only_if) return;
    using Block = GradientBlock<E, GradientTiles<sizeof(E), kDepth, tiling>>;
    extern __shared__ __align__(1024) char memory[];
    for (std::int64_t task = blockIdx.x; task < args.tasks; task += gridDim.x) {
      Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run(task);
      __syncthreads();  // the last task's shared memory is about to be overwritten
    }
  } else {
    __trap();
  }
}

template <class E, int kDepth, Tiling tiling>
__global__ void __launch_bounds__(GradientTiles<sizeof(E), kDepth, tiling>::kThreads)
    lse_remainder_kernel(const __grid_constant__ BackwardArgs args) {
  if constexpr (offered_backward<E, kDepth>(tiling)) {
    using Block = LseRemainderBlock<E, GradientTiles<sizeof(E), kDepth, tiling>>;
    extern __shared__ __align__(1024) char memory[];
    Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run();
  } else {
    __trap();
  }
}

template <class E, int kDepth, Tiling tiling>
BackwardKernels backward_kernels_of() {
  using Sizes = GradientTiles<sizeof(E), kDepth, tiling>;
  using Shared = typename GradientBlock<E, Sizes>::Shared;
  static_assert(tiling != Tiling::small || sizeof(Shared) <= 64 << 10, "small tiles are for 64 KB of shared memory");
  return {reinterpret_cast<const void*>(&terms_kernel<E, kDepth, tiling>),
          reinterpret_cast<const void*>(&lse_remainder_kernel<E, kDepth, tiling>),
          reinterpret_cast<const void*>(&gradients_kernel<E, kDepth, tiling>),
          Sizes::kThreads,
          static_cast<int>(sizeof(typename RowTermsBlock<E, Sizes>::Shared)),
          static_cast<int>(sizeof(Shared)),
          Sizes::kRows,
          kDepth,
          Sizes::kResident};
}

template <class E, int kDepth>
BackwardKernels backward_kernels_of(Tiling tiling) {
  if constexpr (std::is_same_v<E, float>)
    if (tiling == Tiling::tf32) return backward_kernels_of<E, kDepth, Tiling::tf32>();
  return tiling == Tiling::small ? backward_kernels_of<E, kDepth, Tiling::small>()
                                 : backward_kernels_of<E, kDepth, Tiling::large>();
}

template <class E>
BackwardKernels backward_kernels_of(BackwardKind kind) {
  if (kind.depth == 64) return backward_kernels_of<E, 64>(kind.tiling);
  return kind.depth == 128 ? backward_kernels_of<E, 128>(kind.tiling) : backward_kernels_of<E, 256>(kind.tiling);
}

}  // namespace anyflash::cuda
