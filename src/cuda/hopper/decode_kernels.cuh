// Hopper's decoding kernel, and the table of those of one element type.
#pragma once

#include "cuda/hopper/decode.cuh"
#include "cuda/hopper/decode_kernels.h"

namespace anyflash::cuda {

/// On a multiprocessor, of the 227 KB of shared memory that it has for them.
template <class Sizes>
inline constexpr int bulk_decode_blocks = 2 * (sizeof(BulkDecodeShared<Sizes>) + 1024) <= (228 << 10) ? 2 : 1;

template <class Sizes>
__global__ void __launch_bounds__(Sizes::kThreads, bulk_decode_blocks<Sizes>)
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
          static_cast<int>(sizeof(Shared)), bulk_decode_blocks<Sizes>};
}

// Groups of 8 rows of a warp, warps that share keys, that share rows, stages, rows joined at a time, registers. Up to 16
// rows, stages are as many as let two blocks be on a multiprocessor. docs/design-log.md has the figures.
template <class E>
BulkDecodeKernel bulk_decode_kernel_of(int depth, int rows) {
  if (depth == 64) {
    if (rows <= 8) return bulk_decode_kernel_of<BulkDecodeSizes<E, 64, 1, 1, 8, 3, 4>>();
    if (rows <= 16) return bulk_decode_kernel_of<BulkDecodeSizes<E, 64, 2, 1, 8, 3, 4>>();
    return bulk_decode_kernel_of<BulkDecodeSizes<E, 64, 2, 2, 4, 12, 16>>();
  }
  if (depth == 128) {
    if (rows <= 8) return bulk_decode_kernel_of<BulkDecodeSizes<E, 128, 1, 1, 4, 3, 4>>();
    if (rows <= 16) return bulk_decode_kernel_of<BulkDecodeSizes<E, 128, 2, 1, 4, 3, 4>>();
    return bulk_decode_kernel_of<BulkDecodeSizes<E, 128, 2, 2, 4, 5, 16, 232>>();
  }
  if (rows <= 8) return bulk_decode_kernel_of<BulkDecodeSizes<E, 256, 1, 1, 4, 3, 4>>();
  return bulk_decode_kernel_of<BulkDecodeSizes<E, 256, 1, 2, 4, 3, 4, 232>>();
}

}  // namespace anyflash::cuda
