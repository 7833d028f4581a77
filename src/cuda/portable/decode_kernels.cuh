// The decode kernels, and the table of those of one element type.
#pragma once

#include <type_traits>

#include "cuda/portable/decode.cuh"
#include "cuda/portable/decode_join.cuh"
#include "cuda/portable/decode_kernels.h"
#include "cuda/portable/decode_plain.cuh"

namespace anyflash::cuda {

/// Can the GPU that is compiled for be asked for this kernel? On sm_90a Hopper's own kernels compute plain 16-bit
/// calls.
template <class E, bool kPlain>
__host__ __device__ constexpr bool decode_offered(DecodeTiling tiling) {
#if defined(ANYFLASH_CUDA_SMALL_TILES)  // to test these tiles on a GPU that would use others
  return tiling == DecodeTiling::small;
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return tiling != DecodeTiling::small && !(kPlain && sizeof(E) == 2);
#elif defined(__CUDA_ARCH__)
  return tiling == DecodeTiling::small || __CUDA_ARCH__ >= 800;
#else
  return true;
#endif
}

template <class E, int kDepth, DecodeTiling tiling, bool kPlain>
__global__ void __launch_bounds__(DecodeTiles<sizeof(E), kDepth, tiling>::kThreads,
                                  DecodeTiles<sizeof(E), kDepth, tiling>::kBlocksPerMultiprocessor)
    decode_kernel(const __grid_constant__ DecodeArgs args) {
  if constexpr (decode_offered<E, kPlain>(tiling)) {
    using Sizes = DecodeTiles<sizeof(E), kDepth, tiling>;
    using Block = std::conditional_t<kPlain, PlainDecodeBlock<E, Sizes>, DecodeBlock<E, Sizes>>;
    extern __shared__ __align__(1024) char memory[];
    Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run();
  } else {
    __trap();  // never launched: the host asks only for kernels that the GPU has
  }
}

template <class E, int kWarps>
__global__ void __launch_bounds__(DecodeKernels::join_threads) join_kernel(const __grid_constant__ DecodeArgs args) {
  using T = typename ProductsOf<E>::type::Number;
  wait_for_kernel_before();
  // Not earlier, and not with many thread blocks of this kernel running: the next kernel's would fit on some
  // multiprocessors only, and stay there.
  if (static_cast<int>(gridDim.x) <= kJoinsBeside) let_next_kernel_begin();
  join_rows<E, T, DecodeKernels::join_threads, kWarps>(args);
}

template <class E, int kWarps>
const void* join_kernel_of() {
  return reinterpret_cast<const void*>(&join_kernel<E, kWarps>);
}

template <class E, int kDepth, DecodeTiling tiling>
DecodeKernels decode_kernels_of() {
  using Sizes = DecodeTiles<sizeof(E), kDepth, tiling>;
  using Shared = DecodeShared<E, Sizes>;
  static_assert(tiling != DecodeTiling::small || sizeof(Shared) <= 64 << 10, "for 64 KB of shared memory");
  const void *parts = nullptr, *plain = nullptr;
  if constexpr (tiling != DecodeTiling::narrow)
    parts = reinterpret_cast<const void*>(&decode_kernel<E, kDepth, tiling, false>);
  if constexpr (tiling != DecodeTiling::small)
    plain = reinterpret_cast<const void*>(&decode_kernel<E, kDepth, tiling, true>);
  return {parts,
          plain,
          Sizes::kKeys,
          Sizes::kRows,
          kDepth,
          Sizes::kThreads,
          static_cast<int>(sizeof(Shared)),
          Sizes::kBlocksPerMultiprocessor,
          {join_kernel_of<E, 1>(), join_kernel_of<E, 2>(), join_kernel_of<E, 4>(), join_kernel_of<E, 8>()}};
}

template <class E, int kDepth>
DecodeKernels decode_kernels_of(DecodeTiling tiling) {
  if (tiling == DecodeTiling::small) return decode_kernels_of<E, kDepth, DecodeTiling::small>();
  if constexpr (sizeof(E) == 2) {
    if (tiling == DecodeTiling::narrow) return decode_kernels_of<E, kDepth, DecodeTiling::narrow>();
  }
  if constexpr (sizeof(E) == 2 && kDepth <= 128) {
    if (tiling == DecodeTiling::wide) return decode_kernels_of<E, kDepth, DecodeTiling::wide>();
  }
  return decode_kernels_of<E, kDepth, DecodeTiling::large>();
}

template <class E>
DecodeKernels decode_kernels_of(DecodeKind kind) {
  if (kind.depth == 64) return decode_kernels_of<E, 64>(kind.tiling);
  return kind.depth == 128 ? decode_kernels_of<E, 128>(kind.tiling) : decode_kernels_of<E, 256>(kind.tiling);
}

}  // namespace anyflash::cuda
