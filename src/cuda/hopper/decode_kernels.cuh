// Hopper's decoding kernel, and the table of those of one element type.
#pragma once

#include "cuda/hopper/decode.cuh"
#include "cuda/hopper/decode_args.h"
#include "cuda/hopper/decode_group.cuh"
#include "cuda/hopper/kernel.cuh"

namespace anyflash::cuda {

/// Per multiprocessor, of the 227 KB of shared memory that it has for thread blocks.
template <class Shared>
inline constexpr int bulk_decode_blocks = 2 * (sizeof(Shared) + 1024) <= (228 << 10) ? 2 : 1;

template <class Rows>
__global__ void __launch_bounds__(Rows::Sizes::kThreads, bulk_decode_blocks<typename Rows::Shared>)
    bulk_decode_kernel(const __grid_constant__ BulkDecodeArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Sizes = typename Rows::Sizes;
  using Shared = typename Rows::Shared;
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    shared.begin(loading_warps(args));
    prefetch_map(args.maps[0].map), prefetch_map(args.maps[1].map);
  }
  __syncthreads();
  if (threadIdx.x >= 32 * Sizes::kWarps) {
    if constexpr (Sizes::kRegisters > 0) setmaxnreg_dec<Sizes::kLoaderRegisters>();
    const int warp = static_cast<int>(threadIdx.x / 32) - Sizes::kWarps;
    if (warp < loading_warps(args)) BulkDecodeLoader<Sizes, Shared>(args, shared, warp).run();
  } else {
    if constexpr (Sizes::kRegisters > 0) setmaxnreg_inc<Sizes::kRegisters>();
    Rows(args, shared).run();
  }
#else
  __trap();  // never launched: the host asks no other GPU for it
#endif
}

template <class Rows>
BulkDecodeKernel bulk_decode_kernel_of() {
  using Sizes = typename Rows::Sizes;
  return {reinterpret_cast<const void*>(&bulk_decode_kernel<Rows>),
          Sizes::kRows,
          Sizes::kThreads,
          shared_bytes<Rows>(),
          bulk_decode_blocks<typename Rows::Shared>,
          !Sizes::kOneTask};
}

template <class E, int depth, int groups, int row_warps, int key_warps, int stages, int join_rows, int registers = 0>
BulkDecodeKernel bulk_decode_kernel_of() {
  using Sizes = BulkDecodeSizes<E, depth, groups, row_warps, key_warps, stages, join_rows, registers>;
  return bulk_decode_kernel_of<BulkDecodeRows<Sizes>>();
}
template <class E, int depth, int stages>
BulkDecodeKernel group_decode_kernel_of() {
  return bulk_decode_kernel_of<GroupDecodeRows<GroupDecodeSizes<E, depth, stages>>>();
}

// Groups of 8 rows of a warp, warps that share keys, warps that share rows, stages, rows joined at a time, registers;
// for warpgroups, stages. There are as many stages as let two thread blocks share a multiprocessor, where one thread
// block does not have all rows. docs/notes/gpu-decode.md has the figures.
template <ElementType type>
BulkDecodeKernel bulk_decode_kernel(int depth, int rows) {
  using E = NumberOf16<type>;
  if (depth == 64) {
    if (rows <= 8) return bulk_decode_kernel_of<E, 64, 1, 1, 8, 3, 0>();
    if (rows <= 16) return bulk_decode_kernel_of<E, 64, 2, 1, 8, 3, 0>();
    return group_decode_kernel_of<E, 64, 6>();
  }
  if (depth == 128) {
    if (rows <= 8) return bulk_decode_kernel_of<E, 128, 1, 1, 4, 3, 0>();
    if (rows <= 16) return bulk_decode_kernel_of<E, 128, 2, 1, 4, 3, 0>();
    return group_decode_kernel_of<E, 128, 3>();
  }
  if (rows <= 8) return bulk_decode_kernel_of<E, 256, 1, 1, 4, 3, 4>();
  if (rows <= 16) return bulk_decode_kernel_of<E, 256, 1, 2, 4, 3, 4, 232>();
  return group_decode_kernel_of<E, 256, 3>();
}

}  // namespace anyflash::cuda
