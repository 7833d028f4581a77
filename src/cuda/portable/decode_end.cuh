// The end of a decode task: the weights that join the warps' results of a row, and where the result goes.
#pragma once

#include "cuda/portable/decode_shared.cuh"

namespace anyflash::cuda {

/// Shared: has largest, sum, seen and weight of each warp's rows. kWarps: the warps that share the keys of a row.
template <class E, class Shared, int kWarps>
class DecodeEnd {
 public:
  using T = typename Shared::T;

 protected:
  /// warp: its number among the warps that share the keys.
  __device__ __forceinline__ DecodeEnd(const DecodeArgs& args, Shared& shared, int warp)
      : args_(args), call_(args.call), shared_(shared), warp_(warp) {}

  /// The next task, and where its partial results go if there are several parts. (Computed at the task's end instead,
  /// this would take registers from the loop.)
  __device__ __forceinline__ void begin(const DecodeTask& task) {
    task_ = task;
    const auto place = task.place(args_, 0);
    results_ = reinterpret_cast<T*>(args_.results) + place * call_.d_v;
    statistics_ = reinterpret_cast<T*>(args_.statistics) + 3 * place;
  }

  __device__ __forceinline__ T scale() const { return args_.general ? T(1) : static_cast<T>(call_.scale); }
  __device__ __forceinline__ static T infinity() { return FinishedRow<T>::infinity(); }

  /// weight: the factor that P has been multiplied by.
  __device__ __forceinline__ void note(int row, T largest, T sum, bool seen, T weight) {
    shared_.largest[warp_][row] = largest, shared_.sum[warp_][row] = sum, shared_.seen[warp_][row] = seen;
    shared_.weight[warp_][row] = T(1) / weight;
  }

  /// For a part without keys, common where lengths are much shorter than the cache: only its
  /// statistics count. most_rows: of the task.
  __device__ __forceinline__ void leave_nothing(int most_rows) const {
    const int row = static_cast<int>(threadIdx.x);
    if (row < min(most_rows, args_.rows - task_.first_row) && task_.first_value == 0)
      leave_statistics(row, -infinity(), 0, false);
  }
  __device__ __forceinline__ void leave_statistics(int row, T largest, T sum, bool seen) const {
    T* const to = statistics_ + 3 * row;
    to[0] = largest, to[1] = sum, to[2] = seen ? 1 : 0;
  }

  /// Computes the factors of each warp's results of a row: their share of the sum, corrected for a P scaled to sum to a
  /// half. Also computes the row's own statistics.
  __device__ __forceinline__ void weigh(int row) {
    T largest = -infinity(), sum = 0;
    bool seen = false;
    for (int w = 0; w < kWarps; ++w) largest = fmax(largest, shared_.largest[w][row]), seen |= shared_.seen[w][row];
    for (int w = 0; w < kWarps; ++w) {
      const T own = shared_.sum[w][row];
      const T weight = own == T(0) ? T(0) : exp((shared_.largest[w][row] - largest) * scale());
      shared_.weight[w][row] *= weight;
      sum += own * weight;
    }
    T factor = 1;
    if (args_.parts > 1) {
      if (task_.first_value == 0) leave_statistics(row, largest, sum, seen);
    } else {
      const FinishedRow<T> finished(args_, task_.b, task_.query_head(args_, row), task_.query(args_, row), largest,
                                    scale(), sum, seen, task_.first_value == 0);
      factor = finished.factor, seen = !finished.empty;
    }
    for (int w = 0; w < kWarps; ++w) {
      T& weight = shared_.weight[w][row];
      weight = joined_weight(weight, sum, factor, seen && shared_.seen[w][row]);
    }
  }

  /// The weighted mean of the warps' results for a row and channel. number(w): warp w's result.
  template <class Number>
  __device__ __forceinline__ T mean(int row, const Number& number) const {
    T o = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const T weight = shared_.weight[w][row];
      if (counts(weight)) o += number(w) * weight;
    }
    return finite_mean(o, [&] {
      bool all = true;
      for (int w = 0; w < kWarps; ++w) all &= !counts(shared_.weight[w][row]) || is_finite(number(w));
      return all;
    });
  }

  __device__ __forceinline__ void leave(int row, int channel, T o) const {
    if (args_.parts > 1) {
      results_[row * call_.d_v + channel] = o;
      return;
    }
    const auto& out = call_.out;
    reinterpret_cast<E*>(out.data)[task_.b * out.batch + task_.query_head(args_, row) * out.head +
                                   task_.query(args_, row) * out.sequence[2] + channel * out.channel] =
        rounded_mean<E>(o);
  }

  /// The means of rows from `first` on, four channels per thread at a time. Only for plain calls, whose result rows all
  /// begin on 16 bytes. results: [warp][row - first][channel].
  template <int kThreads, int kDepth, int kRows, int kStride>
  __device__ __forceinline__ void leave_rows(int first, int end, const T (&results)[kWarps][kRows][kStride]) const {
    const int channels = min(call_.d_v - task_.first_value, kDepth);
#pragma unroll 2
    for (int n = static_cast<int>(threadIdx.x); n < (end - first) * (kDepth / 4); n += kThreads) {
      const int row = n / (kDepth / 4), channel = n % (kDepth / 4) * 4;
      if (channel >= channels) continue;
      T o[4] = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {  // as mean(), without a branch
        const T weight = shared_.weight[w][first + row];
        const float4 x = *reinterpret_cast<const float4*>(&results[w][row][channel]);
        const bool counted = counts(weight);
        o[0] += counted ? x.x * weight : T(0), o[1] += counted ? x.y * weight : T(0);
        o[2] += counted ? x.z * weight : T(0), o[3] += counted ? x.w * weight : T(0);
      }
      if (isinf(o[0]) | isinf(o[1]) | isinf(o[2]) | isinf(o[3])) {
#pragma unroll 1
        for (int i = 0; i < 4; ++i) o[i] = mean(first + row, [&](int w) { return results[w][row][channel + i]; });
      }
      const int at = task_.first_value + channel;
      if (args_.parts > 1) {
        *reinterpret_cast<float4*>(results_ + (first + row) * call_.d_v + at) = make_float4(o[0], o[1], o[2], o[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) leave(first + row, at + i, o[i]);
      }
    }
  }

  const DecodeArgs& args_;
  const ForwardArgs& call_;
  Shared& shared_;
  const int warp_;
  DecodeTask task_;
  T *results_, *statistics_;  // of the task's part
};

}  // namespace anyflash::cuda
