// Hopper's decoding kernel, and the table of those of one element type.
#pragma once

#include <type_traits>

#include "cuda/hopper/decode.cuh"
#include "cuda/hopper/decode_kernels.h"

namespace anyflash::cuda {

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kThreads, 1)
    bulk_decode_kernel(const __grid_constant__ BulkDecodeArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<BulkDecodeShared<Sizes>*>(memory);
  if (threadIdx.x == 0) shared.begin(), prefetch_map(args.maps[0].map), prefetch_map(args.maps[1].map);
  __syncthreads();
  wait_for_kernel_before();
  let_next_kernel_begin();
  if (threadIdx.x >= 32 * Sizes::kWarps) {
    if constexpr (Sizes::kRegisters > 0) give_registers<Sizes::kLoaderRegisters>();
    if (threadIdx.x < 32 * (Sizes::kWarps + 1)) BulkDecodeLoader<Sizes>(args, shared).run();
  } else {
    if constexpr (Sizes::kRegisters > 0) take_registers<Sizes::kRegisters>();
    BulkDecodeRows<Sizes>(args, shared).run();
  }
#else
  __trap();  // the host asks no other GPU for it
#endif
}

template <class Sizes>
BulkDecodeKernel bulk_decode_kernel_of() {
  using Shared = BulkDecodeShared<Sizes>;
  static_assert(sizeof(Shared) <= 227 << 10, "more shared memory than a block of threads can have");
  return {reinterpret_cast<const void*>(&bulk_decode_kernel<Sizes>), Sizes::kRows, Sizes::kThreads,
          static_cast<int>(sizeof(Shared))};
}

/// Two warps a scheduler in place of one, of 128 channels and at most 8 rows. To be timed.
inline constexpr bool kManyWarps = false;

// Groups of 8 rows of a warp, warps that share keys, that share rows, stages, rows joined at a time,
// registers. None is measured.
template <class E>
BulkDecodeKernel bulk_decode_kernel_of(int depth, int rows) {
  if (depth == 64) {
    if (rows <= 8) return bulk_decode_kernel_of<BulkDecodeSizes<E, 64, 1, 1, 8, 6, 8>>();
    if (rows <= 16) return bulk_decode_kernel_of<BulkDecodeSizes<E, 64, 2, 1, 8, 5, 8>>();
    return bulk_decode_kernel_of<BulkDecodeSizes<E, 64, 2, 2, 4, 12, 16>>();
  }
  if (depth == 128) {
    using Few = std::conditional_t<kManyWarps, BulkDecodeSizes<E, 128, 1, 1, 8, 3, 4>,
                                   BulkDecodeSizes<E, 128, 1, 1, 4, 6, 8>>;
    if (rows <= 8) return bulk_decode_kernel_of<Few>();
    if (rows <= 16) return bulk_decode_kernel_of<BulkDecodeSizes<E, 128, 2, 1, 4, 6, 8>>();
    return bulk_decode_kernel_of<BulkDecodeSizes<E, 128, 2, 2, 4, 5, 16, 232>>();
  }
  if (rows <= 8) return bulk_decode_kernel_of<BulkDecodeSizes<E, 256, 1, 1, 4, 3, 4>>();
  return bulk_decode_kernel_of<BulkDecodeSizes<E, 256, 1, 2, 4, 3, 4, 232>>();
}

}  // namespace anyflash::cuda
