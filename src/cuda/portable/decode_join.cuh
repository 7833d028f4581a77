// Decoding: joins the partial results of split-KV parts.
#pragma once

#include "cuda/portable/decode_shared.cuh"

namespace anyflash::cuda {

/// Computes the factors of each part's results of a row into `weights`, by one warp. store: the row's statistics too.
template <class T>
__device__ __forceinline__ void weigh_parts(const DecodeArgs& args, std::int32_t b, std::int32_t h, std::int32_t query,
                                            std::int64_t first_place, bool store, T* weights) {
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
  const FinishedRow<T> finished(args, b, h, query, largest, scale, sum, seen, store && lane == 0);
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

/// Joins the partial results of rows, each in a fixed order. Part n is a term of sum n % kJoinSums, and the sums are
/// added in a tree. kWarps share a row, some of its sums each: the bits do not depend on their number.
template <class E, class T, int kThreads, int kWarps>
__device__ __forceinline__ void join_rows(const DecodeArgs& args) {
  constexpr int kAllWarps = kThreads / 32, kSums = kJoinSums / kWarps, kChannels = 4;  // per lane at a time
  static_assert(kJoinSums % kWarps == 0 && kAllWarps % kWarps == 0);
  __shared__ T weights_of_warps[kAllWarps][DecodeArgs::most_parts], results[kAllWarps][32 * kChannels];
  const auto& call = args.call;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = warp % kWarps;
  const auto number = static_cast<std::int32_t>(blockIdx.x * (kAllWarps / kWarps) + warp / kWarps);
  const bool exists = number < args.joined;
  const JoinedRow<E, T> row(args, exists ? number : 0);
  T* const weights = weights_of_warps[warp];
  T x[kSums][kChannels], o[kSums][kChannels];
  const auto load = [&](int first, int of_sums) {
#pragma unroll
    for (int n = 0; n < kSums; ++n)
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const int part = of_sums + n * kWarps, channel = first + lane + 32 * c;
        x[n][c] = part < args.parts && channel < call.d_v ? row.from[part * row.step + channel] : T(0);
      }
  };
  const auto add = [&](int of_sums) {
#pragma unroll
    for (int n = 0; n < kSums; ++n) {
      const int part = of_sums + n * kWarps;
      const T weight = part < args.parts ? weights[part] : T(0);
#pragma unroll
      for (int c = 0; c < kChannels; ++c)
        if (counts(weight)) o[n][c] += x[n][c] * weight;
    }
  };
  // Before the weights are known: a latency less. A part without keys has written no results, so this reads whatever
  // bits the workspace holds there. That is harmless: such a part's weight does not count, so add() selects none of them.
  load(0, own);
  weigh_parts(args, row.b, row.h, row.query, row.place, exists && own == 0, weights);
  __syncwarp();
  for (int first = 0; first < call.d_v; first += 32 * kChannels) {
    if (first > 0) load(first, own);
#pragma unroll
    for (int n = 0; n < kSums; ++n)
#pragma unroll
      for (int c = 0; c < kChannels; ++c) o[n][c] = 0;
    add(own);
#pragma unroll(kWarps > 2 ? kWarps / 2 : 1)
    for (int of_sums = own + kJoinSums; of_sums < args.parts; of_sums += kJoinSums) load(first, of_sums), add(of_sums);
#pragma unroll
    for (int half = kSums / 2; half > 0; half /= 2)
#pragma unroll
      for (int n = 0; n < half; ++n)
#pragma unroll
        for (int c = 0; c < kChannels; ++c) o[n][c] += o[n + half][c];
    const auto leave = [&](int channel, T all) {
      all = mean_of_parts(all, args.parts, weights, row.from + channel, row.step);
      row.out[channel * call.out.channel] = rounded_mean<E>(all);
    };
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const int channel = lane + 32 * c;
      if constexpr (kWarps > 1) results[warp][channel] = o[0][c];
      else if (exists && first + channel < call.d_v) leave(first + channel, o[0][c]);
    }
    if constexpr (kWarps > 1) {
      __syncthreads();
      for (int c = own * 32 + lane; exists && c < 32 * kChannels && first + c < call.d_v; c += 32 * kWarps) {
        T sums[kWarps];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sums[w] = results[warp - own + w][c];
#pragma unroll
        for (int half = kWarps / 2; half > 0; half /= 2)
#pragma unroll
          for (int w = 0; w < half; ++w) sums[w] += sums[w + half];
        leave(first + c, sums[0]);
      }
      __syncthreads();
    }
  }
}

}  // namespace anyflash::cuda
