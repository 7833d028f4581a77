#include "tile_machine/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tile_machine/kernels.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/gemm-inl.h"
#include "cpu/exp-inl.h"
#include "cpu/tanh-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anyflash::simulator {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace kernels = cpu::HWY_NAMESPACE;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;

void Multiply(bool add, std::int64_t rows, std::int64_t k, std::int64_t n, const float* a, std::int64_t a_row,
              std::int64_t a_k, const float* b, std::int64_t b_line, float* c, std::int64_t c_line) {
  if (add) kernels::Gemm<true>(rows, k, n, a, a_row, a_k, b, b_line, c, c_line);
  else kernels::Gemm<false>(rows, k, n, a, a_row, a_k, b, b_line, c, c_line);
}

bool Widen(bool half, const char* from, std::int64_t count, float* to) {
  const D d;
  const hn::Rebind<hwy::float16_t, D> narrow;
  const auto lanes = std::int64_t(hn::Lanes(d));
  auto different = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto x = half ? hn::PromoteTo(d, hn::LoadU(narrow, reinterpret_cast<const hwy::float16_t*>(from) + i))
                        : hn::LoadU(d, reinterpret_cast<const float*>(from) + i);
    different = hn::Or(different, hn::Sub(x, x));
    hn::StoreU(x, d, to + i);
  }
  bool finite = hn::AllTrue(d, hn::Eq(different, hn::Zero(d)));
  for (; i < count; ++i) {
    to[i] = half ? hwy::F32FromF16(reinterpret_cast<const hwy::float16_t*>(from)[i])
                 : reinterpret_cast<const float*>(from)[i];
    finite &= std::isfinite(to[i]);
  }
  return finite;
}

void Narrow(bool half, const float* from, std::int64_t count, char* to, bool clamp) {
  if (!half) return void(std::memcpy(to, from, count * sizeof(float)));
  auto* const numbers = reinterpret_cast<hwy::float16_t*>(to);
  for (std::int64_t i = 0; i < count; ++i) {
    const float x = clamp && std::isfinite(from[i]) ? std::clamp(from[i], -65504.0f, 65504.0f) : from[i];
    numbers[i] = x != x ? hwy::BitCastScalar<hwy::float16_t>(std::uint16_t{0x7e00}) : hwy::F16FromF32(x);
  }
}

/// The mask of the vector at a column.
HWY_INLINE hn::Mask<D> Visible(D d, const StepShape& shape, std::int64_t row, std::int64_t column) {
  if (!shape.words) return hn::FirstN(d, hn::Lanes(d));
  const auto bits = shape.words[row * shape.word_line + column / 64] >> (column % 64);
  return hn::LoadMaskBits(d, reinterpret_cast<const std::uint8_t*>(&bits));
}

/// In the order of multiply's sums, so that a P of 1 leaves exactly nothing of dP - delta.
void RowDots(std::int64_t rows, std::int64_t channels, const float* a, const float* b, std::int64_t line, float* dots) {
  const hn::CappedTag<float, 1> d;
  for (std::int64_t row = 0; row < rows; ++row) {
    auto sum = hn::Zero(d);
    for (std::int64_t c = 0; c < channels; ++c)
      sum = hn::MulAdd(hn::LoadU(d, a + row * line + c), hn::LoadU(d, b + row * line + c), sum);
    hn::StoreU(sum, d, dots + row);
  }
}

HWY_INLINE V Rounded(D d, bool half, V x) {
  if (!half) return x;
  const hn::Rebind<hwy::float16_t, D> narrow;
  return hn::PromoteTo(d, hn::DemoteTo(narrow, x));
}

void FinishScores(const StepShape& shape, const ScoreTerms& terms, float* scores) {
  const D d;
  const auto lanes = std::int64_t(hn::Lanes(d));
  for (std::int64_t row = 0; row < shape.rows; ++row)
    for (std::int64_t column = 0; column < shape.line; column += lanes) {
      const auto at = row * shape.line + column;
      auto s = hn::Mul(hn::Load(d, scores + at), hn::Set(d, terms.scale));
      if (terms.cap > 0) {
        const auto cap = hn::Set(d, terms.cap), t = kernels::CapTanh(d, hn::Div(s, cap));
        s = hn::Mul(t, cap);
        if (terms.slopes) hn::Store(hn::NegMulAdd(t, t, hn::Set(d, 1.0f)), d, terms.slopes + at);
      }
      if (terms.bias) s = hn::Add(s, hn::LoadU(d, terms.bias + row * terms.bias_line + column));
      if (terms.keys) {
        auto distance = hn::Zero(d);
        for (int i = 3 - terms.dimensions; i < 3; ++i) {
          const auto y = hn::LoadU(d, terms.keys + i * shape.line + column);
          distance = hn::Add(distance, hn::Abs(hn::Sub(hn::Set(d, terms.queries[row * 3 + i]), y)));
        }
        s = hn::NegMulAdd(hn::Set(d, terms.alibi), distance, s);
      }
      hn::Store(s, d, scores + at);
    }
}

void OnlineSoftmax(const StepShape& shape, bool half, float* scores, float* row_max, float* row_sum,
                   float* accumulators, std::int64_t acc_line) {
  const D d;
  const auto lanes = std::int64_t(hn::Lanes(d));
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    float* const s = scores + row * shape.line;
    auto most = hn::Set(d, -kInfinity);
    for (std::int64_t column = 0; column < shape.line; column += lanes) {
      const auto x = hn::IfThenElse(Visible(d, shape, row, column), hn::Load(d, s + column), hn::Set(d, -kInfinity));
      most = hn::IfThenElse(hn::Gt(x, most), x, most);  // a NaN is no maximum
    }
    const float before = row_max[row], now = std::max(before, hn::ReduceMax(d, most));
    // A NaN beside scores of -inf alone still has to show.
    const float shift = now == -kInfinity ? 0.0f : now;
    if (now > before) {
      const float factor = before == -kInfinity ? 0.0f : std::exp(before - now);
      row_max[row] = now;
      row_sum[row] *= factor;
      for (std::int64_t i = 0; i < acc_line; i += lanes) {
        auto* const to = accumulators + row * acc_line + i;
        hn::Store(hn::Mul(hn::Load(d, to), hn::Set(d, factor)), d, to);
      }
    }
    auto sum = hn::Zero(d);
    for (std::int64_t column = 0; column < shape.line; column += lanes) {
      const auto x = hn::Sub(hn::Load(d, s + column), hn::Set(d, shift));
      const auto p = hn::IfThenElseZero(Visible(d, shape, row, column), kernels::SoftmaxExp(d, x));
      sum = hn::Add(sum, p);
      hn::Store(Rounded(d, half, p), d, s + column);
    }
    row_sum[row] += hn::ReduceSum(d, sum);
  }
}

void SumProbabilities(const StepShape& shape, const float* lse, float* scores, double* sums) {
  const D d;
  const auto lanes = std::int64_t(hn::Lanes(d));
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    float* const s = scores + row * shape.line;
    for (std::int64_t column = 0; column < shape.line; column += lanes) {
      auto x = hn::Sub(hn::Load(d, s + column), hn::Set(d, lse[row]));
      x = hn::IfThenZeroElse(hn::Gt(x, hn::Zero(d)), x);
      hn::Store(hn::IfThenElseZero(Visible(d, shape, row, column), kernels::SoftmaxExp(d, x)), d, s + column);
    }
    double sum = 0;
    for (std::int64_t column = 0; column < shape.columns; ++column) sum += double(s[column]);
    sums[row] += sum;
  }
}

void Differentiate(const StepShape& shape, bool half, const GradientTerms& terms, float* scores, float* dscores) {
  const D d;
  const auto lanes = std::int64_t(hn::Lanes(d));
  const auto zero = hn::Zero(d), gradient = hn::Set(d, terms.gradient);
  for (std::int64_t row = 0; row < shape.rows; ++row)
    for (std::int64_t column = 0; column < shape.line; column += lanes) {
      const auto at = row * shape.line + column;
      const auto visible = Visible(d, shape, row, column);
      auto x =
          hn::Sub(hn::Sub(hn::Load(d, scores + at), hn::Set(d, terms.lse[row])), hn::Set(d, terms.lse_remainders[row]));
      x = hn::IfThenZeroElse(hn::Gt(x, zero), x);  // a score exceeds its row's lse only by rounding
      const auto p = hn::IfThenElseZero(visible, kernels::SoftmaxExp(d, x));
      auto change = hn::Sub(hn::Load(d, dscores + at), hn::Set(d, terms.delta[row]));
      if (terms.dlse) change = hn::Add(change, hn::Set(d, terms.dlse[row]));
      auto ds = hn::Mul(p, change);
      if (terms.dbias) {  // columns beyond the step's belong to others
        const auto count = std::size_t(std::clamp<std::int64_t>(shape.columns - column, 0, lanes));
        hn::StoreN(hn::IfThenElseZero(visible, ds), d, terms.dbias + row * terms.dbias_line + column, count);
      }
      ds = hn::Mul(ds, gradient);
      if (terms.slopes) ds = hn::Mul(ds, hn::Load(d, terms.slopes + at));
      hn::Store(Rounded(d, half, p), d, scores + at);
      ds = hn::IfThenElseZero(visible, ds);
      const auto fits = hn::Le(hn::Abs(ds), hn::Set(d, 65504.0f));  // larger ones would need a scale of the step
      hn::Store(hn::IfThenElse(fits, Rounded(d, half, ds), ds), d, dscores + at);
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::simulator
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anyflash::simulator {

HWY_EXPORT(Multiply);
HWY_EXPORT(Widen);
HWY_EXPORT(Narrow);
HWY_EXPORT(RowDots);
HWY_EXPORT(FinishScores);
HWY_EXPORT(OnlineSoftmax);
HWY_EXPORT(SumProbabilities);
HWY_EXPORT(Differentiate);

void multiply(bool add, std::int64_t rows, std::int64_t k, std::int64_t n, const float* a, std::int64_t a_row,
              std::int64_t a_k, const float* b, std::int64_t b_line, float* c, std::int64_t c_line) {
  HWY_DYNAMIC_DISPATCH(Multiply)(add, rows, k, n, a, a_row, a_k, b, b_line, c, c_line);
}

bool widen(bool half, const char* from, std::int64_t count, float* to) {
  return HWY_DYNAMIC_DISPATCH(Widen)(half, from, count, to);
}

void narrow(bool half, const float* from, std::int64_t count, char* to, bool clamp) {
  HWY_DYNAMIC_DISPATCH(Narrow)(half, from, count, to, clamp);
}

void row_dots(std::int64_t rows, std::int64_t channels, const float* a, const float* b, std::int64_t line,
              float* dots) {
  HWY_DYNAMIC_DISPATCH(RowDots)(rows, channels, a, b, line, dots);
}

void finish_scores(const StepShape& shape, const ScoreTerms& terms, float* scores) {
  HWY_DYNAMIC_DISPATCH(FinishScores)(shape, terms, scores);
}

void online_softmax(const StepShape& shape, bool half, float* scores, float* row_max, float* row_sum,
                    float* accumulators, std::int64_t acc_line) {
  HWY_DYNAMIC_DISPATCH(OnlineSoftmax)(shape, half, scores, row_max, row_sum, accumulators, acc_line);
}

void sum_probabilities(const StepShape& shape, const float* lse, float* scores, double* sums) {
  HWY_DYNAMIC_DISPATCH(SumProbabilities)(shape, lse, scores, sums);
}

void differentiate(const StepShape& shape, bool half, const GradientTerms& terms, float* scores, float* dscores) {
  HWY_DYNAMIC_DISPATCH(Differentiate)(shape, half, terms, scores, dscores);
}

}  // namespace anyflash::simulator
#endif
