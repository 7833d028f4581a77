// From the float32 sums of dQ to its rows. The backward kernel's warpgroups add to the sums in the order of their own
// registers: those of a query block are two parts of 64 x 64, cells of queries where there are two, else panels of channels;
// a part is [tile of 8 columns][thread][4], a thread's four numbers being columns 2t and 2t + 1 of rows g and g + 8.
#pragma once

#include "cuda/hopper/backward.cuh"

namespace anyflash::cuda {

/// One block of threads for each query block of each head.
template <class Sizes>
__global__ void __launch_bounds__(128) store_query_gradients(const __grid_constant__ GroupBackwardArgs args) {
  using E = typename Sizes::Element;
  constexpr int kStride = Sizes::kDepth + 8, kChunks = Sizes::kDepth / 8;
  __shared__ __align__(16) E rows[Sizes::kQueries * kStride];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t tile = blockIdx.x;
  const auto* const sums = reinterpret_cast<const float4*>(args.sums + tile * (Sizes::kQueries * Sizes::kDepth));
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    E* const to = rows + (part * (Sizes::kCells == 2 ? 64 : 0) + warp * 16 + lane / 4) * kStride +
                  part * (Sizes::kCells == 2 ? 0 : 64) + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float4 x = sums[part * 1024 + j * 128 + threadIdx.x];
      to[8 * j] = rounded<E>(x.x * args.scale), to[8 * j + 1] = rounded<E>(x.y * args.scale);
      to[8 * kStride + 8 * j] = rounded<E>(x.z * args.scale), to[8 * kStride + 8 * j + 1] = rounded<E>(x.w * args.scale);
    }
  }
  __syncthreads();
  const auto block = static_cast<std::int32_t>(tile % args.query_blocks);
  const auto head = static_cast<std::int32_t>(tile / args.query_blocks);
  E* const data = reinterpret_cast<E*>(args.grad_q.data) + head / args.heads * args.grad_q.batch +
                  head % args.heads * args.grad_q.head;
  const auto box = box_of(args.query_grid, args.query_rows, block);
  for (int i = threadIdx.x; i < Sizes::kQueries * kChunks; i += 128) {
    const int row = i / kChunks, channel = i % kChunks * 8;
    const auto c = entry_of(box, row);
    if (channel >= args.d_qk || !rules::inside(c, args.query_size)) continue;
    const auto& stride = args.grad_q.sequence;
    *reinterpret_cast<uint4*>(data + c[0] * stride[0] + c[1] * stride[1] + c[2] * stride[2] + channel) =
        *reinterpret_cast<const uint4*>(rows + row * kStride + channel);
  }
}

}  // namespace anyflash::cuda
