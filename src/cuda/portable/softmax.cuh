// What is done to the rows of a tile of scores in registers: reductions, the mask, the online softmax (Milakov and
// Gimelshein 2018). Numbers lie as products.cuh says: a row is four neighbouring lanes'.
#pragma once

#include "cuda/common/exponential.cuh"
#include "rules/bits.h"

namespace anyflash::cuda {

template <class T>
__device__ __forceinline__ T infinity() {
  return sizeof(T) == 8 ? static_cast<T>(__longlong_as_double(0x7ff0000000000000ll))
                        : static_cast<T>(__int_as_float(0x7f800000));
}

__device__ __forceinline__ float larger_of(float a, float b) { return fmaxf(a, b); }  // of a NaN and a number: that
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

/// A lane's scores of one row. word: of the row, from the tile's first key on.
template <class T, int kTiles>
__device__ __forceinline__ void hide_pairs(T (&s)[kTiles][2], rules::Word word) {
  word >>= 2 * (lane_number() % 4);
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (!(word >> (8 * j + e) & 1)) s[j][e] = -infinity<T>();
}

/// E: the type of the call. T: what is computed in.
template <class E, class T, int kSlots>
struct OnlineSoftmax {
  T shift[kSlots];                 ///< what is subtracted from a row's scores
  T largest[kSlots], sum[kSlots];  ///< of this lane's keys alone

  /// s becomes P; the rows' sums follow. What is subtracted from a row's scores is their maximum so far, or less by no
  /// more than terms.lag(): then a tile needs no maximum across lanes. o: the sums of P V, which are scaled down where
  /// the maximum rises. terms.scale(): of scores; terms.unit(): the same, and from the exponential's base to that of
  /// `exponential`.
  template <class Terms, int kKeyTiles, int kValueTiles>
  __device__ __forceinline__ void step(T (&s)[kSlots][kKeyTiles][2], T (&o)[kSlots][kValueTiles][2],
                                       const Terms& terms) {
    T highest[kSlots];
    bool high = false;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      highest[i] = s[i][0][0];
#pragma unroll
      for (int n = 1; n < 2 * kKeyTiles; ++n) highest[i] = larger_of(highest[i], s[i][n / 2][n % 2]);
      high |= highest[i] > shift[i] + terms.lag();
      largest[i] = larger_of(largest[i], highest[i]);
    }
    if (__any_sync(0xffffffffu, high)) raise(highest, o, terms);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      // A row without any score above -inf yet: exp(-inf - 0) = 0, and a NaN stays one.
      const T subtracted = shift[i] == -infinity<T>() ? T(0) : shift[i];
      T added[2] = {};  // of this tile alone: long sums of small numbers lose less so
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          s[i][j][e] = exponential((s[i][j][e] - subtracted) * terms.unit());
          added[e] += s[i][j][e];
        }
      sum[i] += added[0] + added[1];
    }
  }

 private:
  /// Of a difference of scores: that comes first, so the largest score's P is 1 to the bit, however large it is.
  __device__ __forceinline__ static T exponential(T x) {
    if constexpr (sizeof(E) == 8) {
      return Exponential()(x);
    } else if constexpr (sizeof(E) > 2) {
      return exp(x);
    } else {
      return exp2_approximately(x);
    }
  }

  /// Rows whose scores have outgrown their shift get a new one, whatever the other rows of the warp do.
  template <class Terms, int kValueTiles>
  __device__ __forceinline__ void raise(const T (&highest)[kSlots], T (&o)[kSlots][kValueTiles][2],
                                        const Terms& terms) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const T tile = quad_largest(highest[i]);
      const bool rise = tile > shift[i] + terms.lag();
      const T factor = rise && shift[i] != -infinity<T>() ? exp((shift[i] - tile) * terms.scale()) : T(1);
      if (rise) shift[i] = tile;
      sum[i] *= factor;
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) o[i][j][0] *= factor, o[i][j][1] *= factor;
    }
  }
};

}  // namespace anyflash::cuda
