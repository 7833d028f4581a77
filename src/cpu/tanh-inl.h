// tanh for the soft cap, as accurate as the scalar function: the cap multiplies its error in the scores.
//
// |x| < 0.625: x + x^3 p(x^2), p fitted on Chebyshev nodes. Above: 1 - 2 e / (1 + e), e = exp(-2 |x|). NaN stays NaN.
// Measured by tests/cpu/pieces_test.cpp: at most 1.42 units in the last place.

#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_TANH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_TANH_INL_H_
#undef ANYFLASH_CPU_TANH_INL_H_
#else
#define ANYFLASH_CPU_TANH_INL_H_
#endif

#include "cpu/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
struct TanhNumbers;

template <>
struct TanhNumbers<float> {
  static constexpr float p[] = {-0.3333333317214036f, 0.1333330355691574f,    -0.053959259577204544f,
                                0.02176891865102821f, -0.008343945515839153f, 0.002292744816178142f};
};

template <>
struct TanhNumbers<double> {
  static constexpr double p[] = {-0.3333333333333333,    0.13333333333333042,   -0.05396825396789699,
                                 0.021869488519008305,   -0.008863235103240878, 0.0035921217511549622,
                                 -0.0014557754120478055, 0.0005896606577757043, -0.0002375906496055562,
                                 9.257116129556769e-05,  -3.12011014257974e-05, 6.485163482793113e-06};
};

template <class D, class V = hn::Vec<D>, class T = hn::TFromD<D>>
HWY_INLINE V CapTanh(D d, V x) {
  using N = TanhNumbers<T>;
  const V size = hn::Abs(x), one = hn::Set(d, T(1));
  const V e = SoftmaxExp(d, hn::Mul(size, hn::Set(d, T(-2))));
  const V large = hn::Sub(one, hn::Div(hn::Add(e, e), hn::Add(one, e)));
  const V square = hn::Mul(size, size);
  const V p = Polynomial(d, N::p, square);
  const V small = hn::MulAdd(hn::Mul(p, square), size, size);
  return hn::CopySign(hn::IfThenElse(hn::Lt(size, hn::Set(d, T(0.625))), small, large), x);
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_TANH_INL_H_
