// The kernels before and after Hopper's split-bfloat16 float32 backward kernels: row terms, zeroed dQ sums, dQ from its
// sums. One block of 128 threads for each query block of each head. Bound by memory.
#pragma once

#include "cuda/common/split_bf16.h"
#include "cuda/hopper/backward_args.h"
#include "cuda/portable/backward_shared.cuh"
#include "cuda/tile/accumulators.cuh"

namespace anyflash::cuda {

/// Prepares the kernel's row terms from the portable kernel's, and zeroes dQ's sums.
template <int kDepth>
__global__ void __launch_bounds__(128) prepare_split_rows(const __grid_constant__ GroupBackwardArgs args) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *args.not_finite = 0, *args.terms.any_large_lse = 0;
  auto* const sums = reinterpret_cast<float4*>(args.sums + blockIdx.x * std::int64_t{64 * kDepth});
#pragma unroll
  for (int j = 0; j < kDepth / 8; ++j) sums[j * 128 + threadIdx.x] = float4{0, 0, 0, 0};
  if (threadIdx.x >= 64) return;
  const auto at = blockIdx.x * std::int64_t{64} + threadIdx.x;
  const bool live = args.terms.live[blockIdx.x] >> threadIdx.x & 1;
  const auto of = [&](const void* numbers) { return static_cast<const float*>(numbers)[at]; };
  constexpr float product = kSplitScale * kSplitScale;  // the scaling of dP by the products
  args.lse[at] = live ? of(args.terms.lse) : __int_as_float(0x7f800000);
  args.delta[at] = live ? of(args.terms.delta) * product : 0.0f;
  args.dlse[at] = live ? of(args.terms.dlse) * product : 0.0f;
}

/// dQ from its sums.
template <int kDepth>
__global__ void __launch_bounds__(128) store_split_query_gradients(const __grid_constant__ GroupBackwardArgs args) {
  const auto& side = args.sides[queries];
  const auto& rows = side.gradients[0];
  const auto block = static_cast<std::int32_t>(blockIdx.x) % side.blocks;
  const auto head = static_cast<std::int32_t>(blockIdx.x) / side.blocks;
  const auto* const sums = reinterpret_cast<const float4*>(args.sums + blockIdx.x * std::int64_t{64 * kDepth});
  float x[kDepth / 8][4];
#pragma unroll
  for (int j = 0; j < kDepth / 8; ++j) {
    const float4 four = sums[j * 128 + threadIdx.x];
    x[j][0] = four.x, x[j][1] = four.y, x[j][2] = four.z, x[j][3] = four.w;
  }
  store_float_rows(x, rows, head_data<float>(rows, head / side.heads, head % side.heads), args.channels[0],
                   box_of(side.grid, side.plain, block), side.grid.size,
                   static_cast<int>(threadIdx.x / 32 * 16 + lane_number() / 4), args.key_factors[0], args.not_finite);
}

}  // namespace anyflash::cuda
