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
    shared.begin(loading_warps<Sizes>(args));
    prefetch_map(args.maps[0].map), prefetch_map(args.maps[1].map);
  }
  __syncthreads();
  if (threadIdx.x >= 32 * Sizes::kWarps) {
    const int warp = static_cast<int>(threadIdx.x / 32) - Sizes::kWarps;
    BulkDecodeLoader<Sizes, Shared> loader(args, shared, warp);
    if (warp < loading_warps<Sizes>(args)) loader.run();
    else if constexpr (Sizes::kMasks) loader.find_words();
  } else {
    Rows(args, shared).run();
  }
#else
  __trap();  // never launched: the host asks no other GPU for it
#endif
}

template <class Rows>
BulkDecodeKernel bulk_decode_kernel_of() {
  using Sizes = typename Rows::Sizes;
  return {reinterpret_cast<const void*>(&bulk_decode_kernel<Rows>), Sizes::kRows, Sizes::kThreads,
          shared_bytes<Rows>()};
}

template <class E, int depth, int warps, int stages>
BulkDecodeKernel few_rows_kernel_of() {
  return bulk_decode_kernel_of<BulkDecodeRows<BulkDecodeSizes<E, depth, warps, stages>>>();
}
template <class E, int depth, int stages, int row_groups, int key_groups>
BulkDecodeKernel group_kernel_of() {
  return bulk_decode_kernel_of<GroupDecodeRows<GroupDecodeSizes<E, depth, stages, row_groups, key_groups>>>();
}

// Of up to 8 rows that see the same keys: warps, stages; of others: stages, warpgroups of the rows and of the keys. Two
// thread blocks share a multiprocessor where a warpgroup has one alone. docs/notes/gpu-decode.md has the figures.
template <ElementType type>
BulkDecodeKernel bulk_decode_kernel(int depth, int rows, bool masked, bool alone) {
  using E = NumberOf16<type>;
  const bool few = rows <= 8 && !masked, many = rows > 64;
  switch (depth) {
    case 64:
      return few     ? few_rows_kernel_of<E, 64, 8, 3>()
             : many  ? group_kernel_of<E, 64, 12, 2, 1>()
             : alone ? group_kernel_of<E, 64, 12, 1, 2>()
                     : group_kernel_of<E, 64, 6, 1, 1>();
    case 128:
      return few     ? few_rows_kernel_of<E, 128, 4, 3>()
             : many  ? group_kernel_of<E, 128, 6, 2, 1>()
             : alone ? group_kernel_of<E, 128, 6, 1, 2>()
                     : group_kernel_of<E, 128, 3, 1, 1>();
    default: return few ? few_rows_kernel_of<E, 256, 4, 3>() : group_kernel_of<E, 256, 3, 1, 1>();
  }
}

}  // namespace anyflash::cuda
