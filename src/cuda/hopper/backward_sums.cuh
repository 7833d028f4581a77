// From float32 sums to results: dQ and the bias's gradient. The backward kernel's warpgroups add to the sums in the
// order of their registers. The sums of a query block are panels of 64 channels. A panel is [tile of 8
// columns][thread][4], where a thread's four numbers are columns 2t and 2t + 1 of rows g and g + 8 of its warp's 16. In
// the bias's tiles of 64 queries and keys, rows are keys and columns queries.
#pragma once

#include "cuda/hopper/backward_args.h"
#include "cuda/portable/backward_shared.cuh"

namespace anyflash::cuda {

/// One thread block for each query block of each head.
template <class E, int kDepth>
__global__ void __launch_bounds__(128) store_query_gradients(const __grid_constant__ GroupBackwardArgs args) {
  constexpr int kStride = kDepth + 8, kChunks = kDepth / 8;
  __shared__ __align__(16) E rows[64 * kStride];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto index = static_cast<std::int32_t>(gridDim.x - 1 - blockIdx.x);  // the last sums may still be in L2
  const auto* const sums = reinterpret_cast<const float4*>(args.sums + index * std::int64_t{64 * kDepth});
  const float scale = args.factor;
  float zero = 0;
  wait_for_kernel_before();
#pragma unroll
  for (int panel = 0; panel < kDepth / 64; ++panel) {
    E* const to = rows + (warp * 16 + lane / 4) * kStride + panel * 64 + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 x = sums[panel * 1024 + j * 128 + threadIdx.x];
      zero += 0 * x.x + 0 * x.y + 0 * x.z + 0 * x.w;
      to[8 * j] = rounded<E>(x.x * scale), to[8 * j + 1] = rounded<E>(x.y * scale);
      to[8 * kStride + 8 * j] = rounded<E>(x.z * scale), to[8 * kStride + 8 * j + 1] = rounded<E>(x.w * scale);
    }
  }
  if (zero != zero) *args.not_finite = 1;
  __syncthreads();
  const auto& side = args.sides[queries];
  const auto block = index % side.blocks;
  const auto head = index / side.blocks;
  const auto& stride = side.gradients[0].sequence;
  E* const data = head_data<E>(side.gradients[0], head / side.heads, head % side.heads);
  const auto box = box_of(side.grid, side.plain, block);
  for (int i = threadIdx.x; i < 64 * kChunks; i += 128) {
    const int row = i / kChunks, channel = i % kChunks * 8;
    const auto c = entry_of(box, row);
    if (channel >= args.channels[0] || !rules::inside(c, side.grid.size)) continue;
    *reinterpret_cast<uint4*>(data + c[0] * stride[0] + c[1] * stride[1] + c[2] * stride[2] + channel) =
        *reinterpret_cast<const uint4*>(rows + row * kStride + channel);
  }
}

/// Stores the sums of the bias's gradient: one thread block for each 64 queries and 64 keys.
template <class E>
__global__ void __launch_bounds__(128) store_bias_sums(const __grid_constant__ GroupBackwardArgs args) {
  __shared__ float tile[64][65];
  const unsigned lane = lane_number(), warp = threadIdx.x / 32;
  const auto* const sums = reinterpret_cast<const float4*>(args.bias_sums + blockIdx.x * std::int64_t{4096});
#pragma unroll
  for (unsigned j = 0; j < 8; ++j) {
    const float4 x = sums[j * 128 + threadIdx.x];
    const unsigned query = 8 * j + 2 * (lane % 4), key = 16 * warp + lane / 4;
    tile[query][key] = x.x, tile[query + 1][key] = x.y, tile[query][key + 8] = x.z, tile[query + 1][key + 8] = x.w;
  }
  __syncthreads();
  const auto key_blocks = args.sides[keys].blocks, query_blocks = args.sides[queries].blocks;
  const auto row = static_cast<std::int32_t>(blockIdx.x) / key_blocks, head = row / query_blocks;
  const auto key_block = static_cast<std::int32_t>(blockIdx.x) - row * key_blocks;
  const auto& to = args.dbias;
  const auto begin = head / args.bias_size[1] * to.batch + head % args.bias_size[1] * to.head;
  const auto first_query = (row - head * query_blocks) * 64, first_key = key_block * 64;
  for (int i = threadIdx.x; i < 4096; i += 128) {
    const auto query = first_query + i / 64, key = first_key + i % 64;
    if (query < args.bias_size[2] && key < args.bias_size[3])
      write_number(to, begin + query * to.query + key * to.key, tile[i / 64][i % 64]);
  }
}

}  // namespace anyflash::cuda
