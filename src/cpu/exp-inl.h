// exp for softmax. Its argument is a score minus the shift of softmax-inl.h, at most tuning::kShiftLag, or minus lse,
// at most 0 (backward_tile-inl.h ensures that).
//
// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2) / 2, exp(r) = 1 + r + r^2 p(r) with a near-minimax p
// (Chebyshev fit). With AVX-512, exp(x) = 2^n 2^(j / 16) exp(r), 16 n + j = round(16 x / ln 2), |r| <= ln(2) / 32, and
// the 16 powers come from a table. The table holds k 2^(j / 16), and exp(r) = k (1 + q(r)). k is near 1 and chosen so
// that the table's rounding errors are small: 0.22 units in float, 0.16 in double. k itself is exact, so that exp(0) is
// 1.
//
// NaN stays NaN, -inf gives 0, results below the smallest normal number are 0. For x up to 88 (709).
// The error over all floats from -87.3 to 10 is at most 0.90 units in the last place, 0.99 without fused multiply-add,
// 0.76 with the table. The worst arguments are among those of tests/cpu/pieces_test.cpp. In double these errors are at
// most 0.90, 0.99 and 0.76 units.

#include <cstdint>

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

/// Whether powers of two come from a table: if 16 of them fit two registers. Not measured on other instruction sets.
constexpr bool kExpByTable = HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86_64;
constexpr int kExpPowers = 16;

/// round: adding it rounds to an integer. q: exp(r) / k - 1. powers: the bits of k 2^(j / 16), less those of 1 and
/// less j at the exponent's end.
template <class T>
struct ExpNumbers;

template <>
struct ExpNumbers<float> {
  static constexpr float round = 12582912.0f, bias = 127.0f;
  static constexpr int mantissa_bits = 23;
  static constexpr float lowest = -87.33654f;
  static constexpr float ln2_high = 0.693145751953125f, ln2_low = 1.42860682030941723e-6f;
  static constexpr float p[] = {0.49999993447779084f, 0.16666520631627385f, 0.04166838804881742f, 0.008368716887319268f,
                                0.0013814598476173973f};
  static constexpr float q[] = {-0x1.1934ep-7f, 0x1.fb9b2cp-1f, 0x1.fba042p-2f, 0x1.52697cp-3f};
  alignas(64) static constexpr std::uint32_t powers[kExpPowers] = {
      0x00011ba4, 0xfffed2f6, 0xfffccb12, 0xfffb06d5, 0xfff9893f, 0xfff85570, 0xfff76ead, 0xfff6d85e,
      0xfff69614, 0xfff6ab87, 0xfff71c99, 0xfff7ed59, 0xfff92203, 0xfffabf04, 0xfffcc8fa, 0xffff44b8};
};

template <>
struct ExpNumbers<double> {
  static constexpr double round = 6755399441055744.0, bias = 1023.0;
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
  static constexpr double q[] = {-0x1.acea907caa3c1p-18, 0x1.ffff298ab7c2fp-1, 0x1.ffff298ab7c20p-2,
                                 0x1.5554c65b2a3e3p-3,   0x1.5554c65bd25fcp-5, 0x1.1111fc966817fp-7,
                                 0x1.6c1786d10e10dp-10};
  alignas(64) static constexpr std::uint64_t powers[kExpPowers] = {
      0x00000006b3ad1095, 0xffffb55f6c9c394d, 0xffff72bf8b728fcc, 0xffff388210403ae6,
      0xffff0706027d044d, 0xfffedeae9eb2611a, 0xfffebfe3862b0a3c, 0xfffeab10f0bf0eda,
      0xfffea0a7e0d44e7b, 0xfffea11e59ac57fa, 0xfffeacef9819c581, 0xfffec49c4db8558d,
      0xfffee8aadec435d4, 0xffff19a7a2ae3771, 0xffff5825278bf484, 0xffffa4bc78844f30};
};

/// numbers[0] + numbers[1] x + ..
template <class D, class V, class T, int kCount>
HWY_INLINE V Polynomial(D d, const T (&numbers)[kCount], V x) {
  V sum = hn::Set(d, numbers[kCount - 1]);
  for (int i = kCount - 2; i >= 0; --i) sum = hn::MulAdd(sum, x, hn::Set(d, numbers[i]));
  return sum;
}

/// x less the nearest multiple of ln(2) / kParts. bits: how many of those, and kParts times the exponent's bias, at the
/// bottom.
template <int kParts, class D, class V, class VU, class T = hn::TFromD<D>>
HWY_INLINE V TakePowers(D d, V x, VU& bits) {
  using N = ExpNumbers<T>;
  const V round = hn::Set(d, N::round + N::bias * kParts);
  const V rounded = hn::MulAdd(x, hn::Set(d, T(kParts * 1.44269504088896340736)), round);
  const V n = hn::Sub(rounded, round);
  bits = hn::BitCast(hn::DFromV<VU>(), rounded);
  const V r = hn::NegMulAdd(n, hn::Set(d, N::ln2_high / kParts), x);
  return hn::NegMulAdd(n, hn::Set(d, N::ln2_low / kParts), r);
}

/// powers[i mod 16] for each i: the instructions look at the lowest 4 bits alone, which Highway does not promise.
template <class DU, class VU, class U>
HWY_INLINE VU LookUpPower(DU du, const U (&powers)[kExpPowers], VU i) {
  constexpr int lanes = static_cast<int>(hn::MaxLanes(du));
  static_assert(lanes == kExpPowers || 2 * lanes == kExpPowers);
  const decltype(hn::IndicesFromVec(du, i)) at{i.raw};
  if constexpr (lanes == kExpPowers) {
    return hn::TableLookupLanes(hn::Load(du, powers), at);
  } else {
    return hn::TwoTablesLookupLanes(du, hn::Load(du, powers), hn::Load(du, powers + lanes), at);
  }
}

template <class D, class V = hn::Vec<D>, class T = hn::TFromD<D>>
HWY_INLINE V SoftmaxExp(D d, V x) {
  using N = ExpNumbers<T>;
  const hn::RebindToUnsigned<D> du;
  auto bits = hn::Zero(du);
  V result;
  if constexpr (kExpByTable) {
    const V q = Polynomial(d, N::q, TakePowers<kExpPowers>(d, x, bits));
    const auto exponent = hn::ShiftLeft<N::mantissa_bits - 4>(bits);  // and j at its end
    const V power = hn::BitCast(d, hn::Add(LookUpPower(du, N::powers, bits), exponent));
    result = hn::MulAdd(q, power, power);
  } else {
    const V r = TakePowers<1>(d, x, bits), one = hn::Set(d, T(1));
    V p = Polynomial(d, N::p, r);
#if HWY_NATIVE_FMA
    p = hn::MulAdd(hn::MulAdd(p, r, one), r, one);
#else  // a separately rounded product costs less where it is small
    p = hn::Add(hn::MulAdd(hn::Mul(p, r), r, r), one);
#endif
    result = hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<N::mantissa_bits>(bits)));
  }
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, N::lowest)), result);
}

/// Arithmetic of SoftmaxExp on a number: multiply-adds of its polynomial and others, and one or two operations more.
template <class T, class N = ExpNumbers<T>>
constexpr double kExpOperations =
    kExpByTable ? 2 * (sizeof(N::q) / sizeof(T) - 1 + 4) + 1 : 2 * (sizeof(N::p) / sizeof(T) - 1 + 5) + 2;

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_EXP_INL_H_
