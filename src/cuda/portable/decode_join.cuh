// Few queries: the join of what the parts of the keys leave.
#pragma once

#include "cuda/portable/decode_shared.cuh"

namespace anyflash::cuda {

/// Joins what the parts leave of a row, in their order: a block of threads a (batch, query head, query).
template <class E, class T, int kThreads>
__device__ __forceinline__ void join_parts(const DecodeArgs& args) {
  constexpr int kWarps = kThreads / 32, kChannels = 4, kOwn = DecodeArgs::most_parts / 32;  // of a lane at a time
  __shared__ T weights[DecodeArgs::most_parts], results[kWarps][32 * kChannels];
  const auto& call = args.call;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto task = static_cast<std::int32_t>(blockIdx.x);
  const auto query = task % args.queries, h = task / args.queries % call.heads, b = task / args.queries / call.heads;
  const auto row = h % call.group_heads * args.queries + query;
  const auto head = std::int64_t{b} * (call.heads / call.group_heads) + h / call.group_heads;
  const auto place = [&](int part) { return (head * args.parts + part) * args.rows + row; };
  wait_for_kernel_before();
  const T scale = args.general ? T(1) : static_cast<T>(call.scale);
  if (warp == 0) {
    const T* const statistics = reinterpret_cast<const T*>(args.statistics);
    T own_largest[kOwn], share[kOwn], largest = -FinishedRow<T>::infinity(), sum = 0;
    bool seen = false;
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      const bool exists = lane + 32 * n < args.parts;
      const T* const at = statistics + 3 * place(exists ? lane + 32 * n : 0);
      own_largest[n] = at[0], share[n] = exists ? at[1] : T(0);
      seen |= exists && at[2] != T(0);
      if (exists) largest = fmax(largest, own_largest[n]);
    }
    for (int n = 16; n > 0; n /= 2) largest = fmax(largest, __shfl_xor_sync(0xffffffffu, largest, n));
    seen = __any_sync(0xffffffffu, seen);
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      if (share[n] != T(0)) share[n] *= exp((own_largest[n] - largest) * scale);
      sum += share[n];
    }
    for (int n = 16; n > 0; n /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, n);
    const FinishedRow<T> finished(args, b, h, query, largest, scale, sum, seen, lane == 0);
#pragma unroll
    for (int n = 0; n < kOwn; ++n)
      if (lane + 32 * n < args.parts)
        weights[lane + 32 * n] = share[n] != T(0) && !finished.empty ? share[n] / sum * finished.factor : T(0);
  }
  __syncthreads();
  const T* const from = reinterpret_cast<const T*>(args.results);
  E* const out = reinterpret_cast<E*>(call.out.data) + b * call.out.batch + h * call.out.head +
                 query * call.out.sequence[2];
  for (int first = 0; first < call.d_v; first += 32 * kChannels) {
    T o[kChannels] = {};
#pragma unroll 4
    for (int part = warp; part < args.parts; part += kWarps) {
      const T weight = weights[part];
      const T* const at = from + place(part) * call.d_v + first + lane;
#pragma unroll
      for (int n = 0; n < kChannels; ++n)
        if (first + lane + 32 * n < call.d_v && weight != T(0)) o[n] += at[32 * n] * weight;
    }
#pragma unroll
    for (int n = 0; n < kChannels; ++n) results[warp][lane + 32 * n] = o[n];
    __syncthreads();
    for (int c = threadIdx.x; c < 32 * kChannels && first + c < call.d_v; c += kThreads) {
      T all = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) all += results[w][c];
      out[(first + c) * call.out.channel] = rounded<E>(all);
    }
    __syncthreads();
  }
}

}  // namespace anyflash::cuda
