// exp for softmax: of a score less what softmax-inl.h subtracts, at most tuning::kShiftLag, or less lse, at most 0
// (backward_tile-inl.h sees to that).
//
// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2) / 2, exp(r) = 1 + r + r^2 p(r) with a near-minimax p
// (Chebyshev fit). NaN stays NaN, -inf gives 0, results below the smallest normal number are 0. For x up to 88 (709).
// At most 0.90 units in the last place in float, 0.99 where there is no fused multiply-add: of all floats from -87.3 to
// 10, the worst of which are among the arguments of tests/cpu/pieces_test.cpp. In double at most 0.90 and 0.99 of those.

#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_EXP_INL_H_
#undef ANYFLASH_CPU_EXP_INL_H_
#else
#define ANYFLASH_CPU_EXP_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
struct ExpNumbers;

template <>
struct ExpNumbers<float> {
  // Adding it rounds to an integer and leaves n + 127, the exponent's bits, at the bottom.
  static constexpr float round = 12582912.0f + 127.0f;
  static constexpr int mantissa_bits = 23;
  static constexpr float lowest = -87.33654f;
  static constexpr float ln2_high = 0.693145751953125f, ln2_low = 1.42860682030941723e-6f;
  static constexpr float p[] = {0.49999993447779084f, 0.16666520631627385f, 0.04166838804881742f, 0.008368716887319268f,
                                0.0013814598476173973f};
};

template <>
struct ExpNumbers<double> {
  static constexpr double round = 6755399441055744.0 + 1023.0;
  static constexpr int mantissa_bits = 52;
  static constexpr double lowest = -708.3964185322641;
  static constexpr double ln2_high = 0x1.62e42fecp-1, ln2_low = 0x1.d1cf79abc9e3bp-32;
  static constexpr double p[] = {0.5,
                                 0.166666666666666667,
                                 0.0416666666666666768,
                                 0.00833333333333333401,
                                 0.0013888888888879074,
                                 0.000198412698412632991,
                                 0.0000248015873364422379,
                                 2.75573192472187308e-6,
                                 2.75572632790884969e-7,
                                 2.50520710942935468e-8,
                                 2.09181377376427364e-9,
                                 1.60866279567803688e-10};
};

template <class D, class V = hn::Vec<D>, class T = hn::TFromD<D>>
HWY_INLINE V SoftmaxExp(D d, V x) {
  using N = ExpNumbers<T>;
  const hn::RebindToUnsigned<D> du;
  const V rounded = hn::MulAdd(x, hn::Set(d, T(1.44269504088896340736)), hn::Set(d, N::round));
  const V n = hn::Sub(rounded, hn::Set(d, N::round));
  V r = hn::NegMulAdd(n, hn::Set(d, N::ln2_high), x);
  r = hn::NegMulAdd(n, hn::Set(d, N::ln2_low), r);
  constexpr int count = sizeof(N::p) / sizeof(T);
  V p = hn::Set(d, N::p[count - 1]);
  for (int i = count - 2; i >= 0; --i) p = hn::MulAdd(p, r, hn::Set(d, N::p[i]));
  const V one = hn::Set(d, T(1));
#if HWY_NATIVE_FMA
  p = hn::MulAdd(hn::MulAdd(p, r, one), r, one);
#else  // a product rounded by itself costs less where it is small
  p = hn::Add(hn::MulAdd(hn::Mul(p, r), r, r), one);
#endif
  const V power = hn::BitCast(d, hn::ShiftLeft<N::mantissa_bits>(hn::BitCast(du, rounded)));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, N::lowest)), hn::Mul(p, power));
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_EXP_INL_H_
