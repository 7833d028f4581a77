// score_mod: from the product of a query and a key to their score, where it needs more than a scale. Forward and
// backward share it because P is exp(score - lse): both must get the same score to the bit. Hence products are rounded
// separately and never fused into a sum.
#pragma once

#include "cuda/portable/rows.cuh"

namespace anyflash::cuda {

__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

/// 1 - tanh(x)^2. In float64 without that difference, which amplifies the rounding error of tanh near 1.
__device__ __forceinline__ float derivative_of_tanh(float, float tanh_x) { return fmaf(-tanh_x, tanh_x, 1.0f); }
__device__ __forceinline__ double derivative_of_tanh(double x, double) {
  const double u = exp(-2 * fabs(x));
  return 4 * u / ((1 + u) * (1 + u));
}

/// The terms that all scores of a head share.
template <class T>
struct ScoreTerms {
  T scale, cap, cap_inverse, slope;  // slope: ALiBi's
  Numbers bias;                      // data: of the head
  bool has_alibi;
  int first_dimension;

  template <class Args>
  __device__ __forceinline__ ScoreTerms(const Args& args, std::int32_t b, std::int32_t h)
      : scale(static_cast<T>(args.scale)),
        cap(static_cast<T>(args.softcap)),
        cap_inverse(cap > 0 ? T(1) / cap : T(0)),
        slope(0),
        bias(args.bias),
        has_alibi(args.alibi.data != nullptr),
        first_dimension(3 - args.dimensions) {
    if (has_alibi) slope = read_number<T>(args.alibi, b * args.alibi.batch + h * args.alibi.head);
    head_ = b * bias.batch + h * bias.head;
  }

  /// row_at, key_at: the pair's bias is at their sum; nowhere: the row or key does not exist. gap(n): the difference of
  /// the pair's coordinates in dimension n. derivative: of the soft cap.
  template <class Gap>
  __device__ __forceinline__ T finish(T product, std::int64_t row_at, std::int64_t key_at, const Gap& gap,
                                      T& derivative) const {
    T x = rounded_product(product, scale);
    if (cap > 0) {
      const T share = rounded_product(x, cap_inverse), capped = tanh(share);
      derivative = derivative_of_tanh(share, capped);
      x = rounded_product(capped, cap);
    }
    if (bias.data && row_at != nowhere && key_at != nowhere) x += read_number<T>(bias, head_ + row_at + key_at);
    if (has_alibi) {
      T distance = 0;
      for (int n = first_dimension; n < 3; ++n) distance += abs(gap(n));
      x = fma(-slope, distance, x);
    }
    return x;
  }

 private:
  std::int64_t head_;
};

}  // namespace anyflash::cuda
