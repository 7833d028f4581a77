// From products Q K^T to scores: scale, soft cap, bias, ALiBi. (The mask comes later, as words.)

#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_SCORES_INL_H_
#undef ANYFLASH_CPU_SCORES_INL_H_
#else
#define ANYFLASH_CPU_SCORES_INL_H_
#endif

#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// True if scores are scale * Q K^T and nothing else, so that FinishScores is not needed.
inline bool PlainScores(const Problem& problem) {
  return problem.softcap <= 0 && !problem.bias.given() && !problem.alibi.given();
}

/// x becomes cap * tanh(x / cap); slope, if not null, the derivative 1 - tanh^2.
template <class T>
void CapScores(T scale, T cap, T* HWY_RESTRICT s, T* HWY_RESTRICT slope, std::int64_t count) {
  const hn::ScalableTag<T> d;
  const auto factor = hn::Set(d, scale), limit = hn::Set(d, cap), one = hn::Set(d, T(1));
  for (std::int64_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto x = hn::Div(hn::Mul(hn::Load(d, s + i), factor), limit);
    const auto t = hn::IfThenElse(hn::IsNaN(x), x, hn::Tanh(d, x));
    hn::Store(hn::Mul(t, limit), d, s + i);
    if (slope) hn::Store(hn::NegMulAdd(t, t, one), d, slope + i);
  }
}

template <class T>
void ScaleScores(T scale, T* HWY_RESTRICT s, std::int64_t count) {
  const hn::ScalableTag<T> d;
  const auto factor = hn::Set(d, scale);
  for (std::int64_t i = 0; i < count; i += hn::Lanes(d)) hn::Store(hn::Mul(hn::Load(d, s + i), factor), d, s + i);
}

/// One row of a tile: bias at `row` (in elements) and at `key_at[j]` from there for key j; j < 0 outside.
template <class T>
void AddBiasRow(const Bias& bias, std::int64_t row, const std::int64_t* key_at, const bool* inside, bool side_by_side,
                T* HWY_RESTRICT s) {
  const hn::ScalableTag<T> d;
  if (side_by_side && bias.type == (sizeof(T) == 8 ? ElementType::float64 : ElementType::float32)) {
    const T* from = reinterpret_cast<const T*>(bias.data) + row + key_at[0];
    for (int j = 0; j < kTile; j += static_cast<int>(hn::Lanes(d)))
      hn::Store(hn::Add(hn::Load(d, s + j), hn::LoadU(d, from + j)), d, s + j);
    return;
  }
  for (int j = 0; j < kTile; ++j)
    if (inside[j]) s[j] += static_cast<T>(ReadNumber(bias.data, bias.type, row + key_at[j]));
}

/// Adds the bias to the scores of a query box (rows, 64 keys); padding is left alone.
template <class T>
void AddBias(const Problem& problem, std::int64_t b, std::int64_t h, const Box& queries, const Box& keys, T* s) {
  const auto& bias = problem.bias;
  std::int64_t key_at[kTile];
  bool inside[kTile], side_by_side = true;
  for (int j = 0; j < kTile; ++j) {
    const Int3 c = keys.entry(j);
    inside[j] = rules::inside(c, problem.k_size);
    key_at[j] = inside[j] ? rules::flat_index(c, problem.k_size) * bias.stride[3] : 0;
    side_by_side &= inside[j] && key_at[j] == key_at[0] + j;
  }
  const auto base = b * bias.stride[0] + h * bias.stride[1];
  const auto rows = static_cast<std::int32_t>(rules::volume(queries.extent));
  for (std::int32_t r = 0; r < rows; ++r) {
    const Int3 c = queries.entry(r);
    if (!rules::inside(c, problem.q_size)) continue;
    AddBiasRow(bias, base + rules::flat_index(c, problem.q_size) * bias.stride[2], key_at, inside, side_by_side, s + r * kTile);
  }
}

/// Subtracts slope * sum_i |x_i - y_i|, in aligned coordinates (Press et al. 2022, on any number of dimensions).
template <class T>
void AddAlibi(const Problem& problem, const rules::Program& program, T slope, const Box& queries, const Box& keys, T* s) {
  const hn::ScalableTag<T> d;
  HWY_ALIGN T y[3][kTile] = {};
  for (int j = 0; j < kTile; ++j) {
    const Int3 c = keys.entry(j);
    if (!rules::inside(c, program.k_size())) continue;
    const auto at = rules::key_coordinate(program, c);
    for (int i = 0; i < 3; ++i) y[i][j] = static_cast<T>(at[i]);
  }
  const auto rows = static_cast<std::int32_t>(rules::volume(queries.extent));
  for (std::int32_t r = 0; r < rows; ++r) {
    const Int3 c = queries.entry(r);
    if (!rules::inside(c, problem.q_size)) continue;
    const auto at = rules::query_coordinate(program, c);
    for (int j = 0; j < kTile; j += static_cast<int>(hn::Lanes(d))) {
      auto distance = hn::Zero(d);
      for (int i = 3 - problem.dimensions; i < 3; ++i)
        distance = hn::Add(distance, hn::Abs(hn::Sub(hn::Set(d, static_cast<T>(at[i])), hn::Load(d, y[i] + j))));
      T* row = s + r * kTile + j;
      hn::Store(hn::NegMulAdd(hn::Set(d, slope), distance, hn::Load(d, row)), d, row);
    }
  }
}

/// s: (rows of the query box, 64) products, become scores. slope: the same shape, the soft cap's derivative, or null.
template <class T>
void FinishScores(const Problem& problem, const rules::Program& program, std::int64_t b, std::int64_t h, const Box& queries,
                  const Box& keys, T* s, T* slope) {
  const auto count = rules::volume(queries.extent) * kTile;
  if (problem.softcap > 0) {
    CapScores(static_cast<T>(problem.scale), static_cast<T>(problem.softcap), s, slope, count);
  } else {
    ScaleScores(static_cast<T>(problem.scale), s, count);
  }
  if (problem.bias.given()) AddBias(problem, b, h, queries, keys, s);
  if (problem.alibi.given())
    AddAlibi(problem, program, static_cast<T>(ReadHeadNumber(problem.alibi, b, h)), queries, keys, s);
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_SCORES_INL_H_
