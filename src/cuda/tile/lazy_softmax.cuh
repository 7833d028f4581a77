// The online softmax with lazy rescaling (Milakov and Gimelshein 2018) of a warpgroup's 64 rows, two per lane. `shift`,
// which is subtracted from a row's scores, need not be their maximum: any number near it gives the same P / row_sum.
// Only a row's first step finds a maximum before the exponentials. The other steps subtract the known shift, and raise
// it if their sums show that it is too small. They need no pass over the scores and no maximum across lanes.
#pragma once

#include <cfloat>

#include "cuda/tile/register_tile.cuh"

namespace anyflash::cuda {

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_total(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// m and l of a row; for a row that sees nothing, the initial values.
struct RowStatistics {
  float m = -__builtin_huge_valf(), l = 0;

  __device__ __forceinline__ void add_sink(float sink) {
    const float together = fmaxf(m, sink);
    if (together == -__builtin_huge_valf()) return;
    l = l * expf(m - together) + expf(sink - together), m = together;
  }
};

/// A row at its end: `sum` is over all keys, and O has to be multiplied by `factor`.
struct FinishedRow {
  static constexpr float kMinusInfinity = -__builtin_huge_valf();
  /// From here on exp(score - shift) is not near 1 for the largest score, of which `shift` is a rounding.
  static constexpr float kLargestShift = 1 << 28;
  float shift, sum, factor = 1, largest = kMinusInfinity;

  /// The sink is a score without a value. A shift of kLargestShift or more makes the result NaN.
  __device__ __forceinline__ void add_sink(float sink) {
    constexpr float log2_e = 1.4426950409f;
    if (shift == kMinusInfinity && sink == kMinusInfinity) return;
    const float together = fmaxf(shift, sink * log2_e);
    factor = exp2f(shift - together);
    sum = fabsf(together) < kLargestShift ? sum * factor + exp2f(fmaf(sink, log2_e, -together)) : NAN;
    shift = together;
  }
  /// Before the sink. The largest score's P is a term of the sum, and exactly 1 in l. maxima: were they noted? If not, m is
  /// a number near the largest score. Its unit is that of scores, in which scale_log2 is not rounded: pairs of other kernels
  /// and sinks have it too.
  __device__ __forceinline__ RowStatistics statistics(float scale_log2, float scale, bool maxima) const {
    if (sum == 0) return {};
    const float m = maxima ? largest : fminf(__fdiv_rn(shift, scale_log2), FLT_MAX);
    return {m * scale, __fdiv_rn(sum, exp2_approximately(fmaf(m, scale_log2, -shift)))};
  }
  __device__ __forceinline__ float lse() const { return sum == 0 ? kMinusInfinity : shift * 0.6931471806f + logf(sum); }
};

struct LazySoftmax {
  /// Of scores times scale_log2, the same in all lanes of a row. kMinusInfinity: no key seen yet; kLowest: only keys whose
  /// scores times scale_log2 are less than any number.
  float shift[2];
  float row_sum[2];  ///< over this lane's keys
  float largest[2];  ///< greatest score of this lane's keys, if `maxima` are noted
  static constexpr float kMinusInfinity = -__builtin_huge_valf(), kLowest = -FLT_MAX;
  static constexpr float kRescaleThreshold = 8;  ///< rows are rescaled when P would exceed 2^kRescaleThreshold

  __device__ __forceinline__ void reset() {
    shift[0] = shift[1] = largest[0] = largest[1] = kMinusInfinity;
    row_sum[0] = row_sum[1] = step_sum_[0] = step_sum_[1] = 0;
  }

  /// s becomes P. Rows that have no shift yet start with their maximum. maxima: note those of all steps, for the
  /// statistic m, which nothing else needs.
  template <int kCols>
  __device__ __forceinline__ void exponentiate(AccumulatorTile<kCols>& s, float scale_log2, bool maxima) {
    using Tile = AccumulatorTile<kCols>;
    const bool begins = __any_sync(0xffffffffu, shift[0] <= kLowest || shift[1] <= kLowest);
    if (begins || maxima) {
      float row_max[2];
      row_maxima(s, row_max);
      largest[0] = fmaxf(largest[0], row_max[0]), largest[1] = fmaxf(largest[1], row_max[1]);
      if (begins) init_rows(row_max, scale_log2);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float subtracted = shift[r] <= kLowest ? 0.0f : shift[r];
      float sum[2] = {};
#pragma unroll
      for (int n = 0; n < Tile::kPerRow; ++n) {
        float& x = s.at(r, n);
        x = exp2_approximately(fmaf(x, scale_log2, -subtracted));
        sum[n % 2] += x;
      }
      step_sum_[r] = sum[0] + sum[1];
      row_sum[r] += step_sum_[r];
    }
  }
  /// After exponentiate(): raises shifts that the step's sums show to be too small. True if O and P have to be
  /// rescaled, each row by `factor`. (Where a shift, which is rounded, rises by more than 126, the result is NaN, and the
  /// non-finite fallback computes it.)
  __device__ __forceinline__ bool raise_shift_by_sums(float (&factor)[2]) {
    constexpr float limit = 1 << int(kRescaleThreshold);
    const bool raised = __any_sync(0xffffffffu, step_sum_[0] > limit || step_sum_[1] > limit);
    if (raised) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float raised_shift = shift[r] + __log2f(fmaxf(quad_max(step_sum_[r]), 1.0f));
        const float fall = fminf(shift[r] - raised_shift, 0.0f);  // rounded; 0 where the shift is not finite
        // A factor of less than 2^-126 would be 0, which hides the row.
        factor[r] = fall < -126 ? NAN : exp2_approximately(fall);
        shift[r] = raised_shift, row_sum[r] *= factor[r];
      }
    }
    return raised;
  }

  /// The row that this lane finishes: in even lanes the first, in odd ones the second. maxima: were they noted?
  __device__ __forceinline__ FinishedRow finished(bool maxima) const {
    const bool odd = lane_number() % 2;
    const float first = quad_total(row_sum[0]), second = quad_total(row_sum[1]);
    FinishedRow row{odd ? shift[1] : shift[0], odd ? second : first};
    if (!maxima) return row;
    const float m0 = quad_max(largest[0]), m1 = quad_max(largest[1]);
    row.largest = odd ? m1 : m0;
    return row;
  }

 private:
  template <int kCols>
  __device__ __forceinline__ static void row_maxima(AccumulatorTile<kCols>& s, float (&row_max)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float part[4] = {s.at(r, 0), s.at(r, 1), s.at(r, 2), s.at(r, 3)};  // short chains: a maximum takes 5 clocks
#pragma unroll
      for (int n = 4; n < AccumulatorTile<kCols>::kPerRow; ++n) part[n % 4] = fmaxf(part[n % 4], s.at(r, n));
      row_max[r] = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
    }
  }
  /// Rows without a shift: their keys before this step, if any, weigh nothing beside a score that its scale bears.
  __device__ __forceinline__ void init_rows(const float (&row_max)[2], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float largest_score = quad_max(row_max[r]);
      if (shift[r] <= kLowest && largest_score != kMinusInfinity) shift[r] = fmaxf(largest_score * scale_log2, kLowest);
    }
  }

  float step_sum_[2];  ///< of the last step, over this lane's keys
};

}  // namespace anyflash::cuda
