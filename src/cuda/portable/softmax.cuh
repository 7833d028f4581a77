// Operations on the rows of a score tile in registers: reductions, the mask, the online softmax (Milakov and Gimelshein
// 2018). The layout is that of products.cuh: a row is spread over four neighbouring lanes.
#pragma once

#include "cuda/common/exponential.cuh"
#include "rules/bits.h"

namespace anyflash::cuda {

template <class T>
__device__ __forceinline__ T infinity() {
  return sizeof(T) == 8 ? static_cast<T>(__longlong_as_double(0x7ff0000000000000ll))
                        : static_cast<T>(__int_as_float(0x7f800000));
}

__device__ __forceinline__ float larger_of(float a, float b) { return fmaxf(a, b); }  // of a NaN and a number: the NaN
__device__ __forceinline__ double larger_of(double a, double b) { return fmax(a, b); }

/// Over the lanes of a row.
template <class T>
__device__ __forceinline__ T quad_largest(T x) {
  x = larger_of(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return larger_of(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
template <class T>
__device__ __forceinline__ T quad_sum(T x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// A lane's scores of one row. word: the row's mask word, from the tile's first key on.
template <class T, int kTiles>
__device__ __forceinline__ void hide_pairs(T (&s)[kTiles][2], rules::Word word) {
  word >>= 2 * (lane_number() % 4);
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (!(word >> (8 * j + e) & 1)) s[j][e] = -infinity<T>();
}

/// E: the type of the call. T: the computation's type.
template <class E, class T, int kRowGroups>
struct OnlineSoftmax {
  T shift[kRowGroups];                     ///< what is subtracted from a row's scores
  T largest[kRowGroups], sum[kRowGroups];  ///< over this lane's keys only

  /// score(i, n): a lane's number n of row i; it becomes P, which is added to the row's sum. The shift, which is
  /// subtracted from a row's scores, is their maximum so far or less by at most terms.lag(): most tiles then need no
  /// maximum across lanes. rescale(i, factor): of row i of O, where the shift rises. terms.scale(): of scores;
  /// terms.unit(): the scale in the units of `exponential`.
  template <int kNumbers, class Score, class Rescale, class Terms>
  __device__ __forceinline__ void step(const Score& score, const Rescale& rescale, const Terms& terms) {
    T highest[kRowGroups];
    bool high = false;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      highest[i] = score(i, 0);
#pragma unroll
      for (int n = 1; n < kNumbers; ++n) highest[i] = larger_of(highest[i], score(i, n));
      high |= highest[i] > shift[i] + terms.lag();
      largest[i] = larger_of(largest[i], highest[i]);
    }
    if (__any_sync(0xffffffffu, high)) raise(highest, rescale, terms);
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      // A row without any score above -inf yet: exp(-inf - 0) = 0, and a NaN stays one.
      const T subtracted = shift[i] == -infinity<T>() ? T(0) : shift[i];
      T added[2] = {};  // of this tile only: long sums of small numbers then lose less accuracy
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) {
        T& x = score(i, n);
        x = exponential((x - subtracted) * terms.unit());
        added[n % 2] += x;
      }
      sum[i] += added[0] + added[1];
    }
  }
  /// The same for tiles in the layout of products.cuh. o: the sums of P V.
  template <class Terms, int kKeyTiles, int kValueTiles>
  __device__ __forceinline__ void step(T (&s)[kRowGroups][kKeyTiles][2], T (&o)[kRowGroups][kValueTiles][2],
                                       const Terms& terms) {
    const auto rescale = [&](int i, T factor) {
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) o[i][j][0] *= factor, o[i][j][1] *= factor;
    };
    step<2 * kKeyTiles>([&](int i, int n) -> T& { return s[i][n / 2][n % 2]; }, rescale, terms);
  }

 private:
  /// Of a difference of scores, which is computed first, so that the largest score's P is exactly 1, however large the
  /// score is.
  __device__ __forceinline__ static T exponential(T x) {
    if constexpr (sizeof(E) == 8) {
      return Exponential()(x);
    } else if constexpr (sizeof(E) > 2) {
      return exp(x);
    } else {
      return exp2_approximately(x);
    }
  }

  /// Gives rows whose scores exceed their shift by more than the lag a new shift, whatever the other rows of the warp
  /// do.
  template <class Rescale, class Terms>
  __device__ __forceinline__ void raise(const T (&highest)[kRowGroups], const Rescale& rescale, const Terms& terms) {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      const T tile = quad_largest(highest[i]);
      const bool rise = tile > shift[i] + terms.lag();
      const T factor = rise && shift[i] != -infinity<T>() ? exp((shift[i] - tile) * terms.scale()) : T(1);
      if (rise) shift[i] = tile;
      sum[i] *= factor;
      rescale(i, factor);
    }
  }
};

}  // namespace anyflash::cuda
