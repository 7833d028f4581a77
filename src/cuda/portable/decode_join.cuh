// Decoding: joins the partial results of split-KV parts.
#pragma once

#include "cuda/portable/decode_shared.cuh"

namespace anyflash::cuda {

/// Computes the factors of each part's results of a row into `weights`, by one warp, and stores the row's statistics.
template <class T>
__device__ __forceinline__ void weigh_parts(const DecodeArgs& args, std::int32_t b, std::int32_t h, std::int32_t query,
                                            std::int64_t first_place, T* weights) {
  constexpr int kOwn = DecodeArgs::most_parts / 32;  // parts per lane
  const int lane = static_cast<int>(lane_number());
  const T scale = args.general ? T(1) : static_cast<T>(args.call.scale);
  const T* const statistics = reinterpret_cast<const T*>(args.statistics) + 3 * first_place;
  T own_largest[kOwn], share[kOwn], largest = -FinishedRow<T>::infinity(), sum = 0;
  bool seen = false, own_seen[kOwn];
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const bool exists = lane + 32 * n < args.parts;
    const T* const at = statistics + std::int64_t{3} * args.rows * (exists ? lane + 32 * n : 0);
    own_largest[n] = *at, share[n] = exists ? at[1] : T(0);
    own_seen[n] = exists && at[2] != T(0);
    seen |= own_seen[n];
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
      weights[lane + 32 * n] = joined_weight(share[n], sum, finished.factor, own_seen[n] && !finished.empty);
}

/// The weighted mean of the parts' results for a channel. at: of the first part; step: from one part to the next.
template <class T>
__device__ __forceinline__ T mean_of_parts(T mean, int parts, const T* weights, const T* at, std::int64_t step) {
  return finite_mean(mean, [&] {
    bool all = true;
    for (int part = 0; part < parts; ++part) all &= !counts(weights[part]) || is_finite(__ldcg(at + part * step));
    return all;
  });
}

/// A row's partial results, and where the result goes.
template <class E, class T>
struct JoinedRow {
  std::int32_t b, h, query;
  std::int64_t place;  ///< of the first part
  const T* from;
  std::int64_t step;  ///< from one part to the next
  E* out;

  __device__ __forceinline__ JoinedRow(const DecodeArgs& args, std::int32_t number) {
    const auto& call = args.call;
    query = number % args.queries, h = number / args.queries % call.heads, b = number / args.queries / call.heads;
    const auto row = h % call.group_heads * args.queries + query;
    const auto head = std::int64_t{b} * (call.heads / call.group_heads) + h / call.group_heads;
    place = head * args.parts * args.rows + row;
    from = reinterpret_cast<const T*>(args.results) + place * call.d_v;
    step = std::int64_t{args.rows} * call.d_v;
    out = reinterpret_cast<E*>(call.out.data) + b * call.out.batch + h * call.out.head + query * call.out.sequence[2];
  }
};

/// Joins the partial results of a row in a fixed order: one thread block per (batch, query head, query).
template <class E, class T, int kThreads>
__device__ __forceinline__ void join_parts(const DecodeArgs& args) {
  constexpr int kWarps = kThreads / 32, kChannels = 4;  // per lane at a time
  static_assert(kWarps == kJoinSums);
  __shared__ T weights[DecodeArgs::most_parts], results[kWarps][32 * kChannels];
  const auto& call = args.call;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const JoinedRow<E, T> row(args, static_cast<std::int32_t>(blockIdx.x));
  if (warp == 0) weigh_parts(args, row.b, row.h, row.query, row.place, weights);
  __syncthreads();
  for (int first = 0; first < call.d_v; first += 32 * kChannels) {
    T o[kChannels] = {};
#pragma unroll 4
    for (int part = warp; part < args.parts; part += kWarps) {
      const T weight = weights[part];
      const T* const at = row.from + part * row.step + first + lane;
#pragma unroll
      for (int n = 0; n < kChannels; ++n)
        if (first + lane + 32 * n < call.d_v && counts(weight)) o[n] += at[32 * n] * weight;
    }
#pragma unroll
    for (int n = 0; n < kChannels; ++n) results[warp][lane + 32 * n] = o[n];
    __syncthreads();
    for (int c = threadIdx.x; c < 32 * kChannels && first + c < call.d_v; c += kThreads) {
      T all = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) all += results[w][c];
      all = mean_of_parts(all, args.parts, weights, row.from + first + c, row.step);
      row.out[(first + c) * call.out.channel] = rounded_mean<E>(all);
    }
    __syncthreads();
  }
}

/// The same, with the same bits, of a row by each warp: faster if there are more rows than thread blocks at a time.
template <class E, class T, int kThreads>
__device__ __forceinline__ void join_many_rows(const DecodeArgs& args) {
  __shared__ T weights_of_warps[kThreads / 32][DecodeArgs::most_parts];
  const auto& call = args.call;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto number = static_cast<std::int32_t>(blockIdx.x * (kThreads / 32) + warp);
  if (number >= args.joined) return;
  const JoinedRow<E, T> row(args, number);
  T* const weights = weights_of_warps[warp];
  weigh_parts(args, row.b, row.h, row.query, row.place, weights);
  __syncwarp();
  for (int c = lane; c < call.d_v; c += 32) {
    T o[kJoinSums] = {}, all = 0;
    for (int first = 0; first < args.parts; first += kJoinSums)
#pragma unroll
      for (int w = 0; w < kJoinSums; ++w)
        if (first + w < args.parts && counts(weights[first + w]))
          o[w] += row.from[(first + w) * row.step + c] * weights[first + w];
#pragma unroll
    for (int w = 0; w < kJoinSums; ++w) all += o[w];
    row.out[c * call.out.channel] = rounded_mean<E>(mean_of_parts(all, args.parts, weights, row.from + c, row.step));
  }
}

}  // namespace anyflash::cuda
