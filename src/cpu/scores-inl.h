// score_mod: from products Q K^T to scores by scale, soft cap, bias and ALiBi. (The mask is applied later, as words.)

#include <bit>
#include <cstdint>

#include "cpu/gemm-inl.h"
#include "cpu/numbers.h"
#include "hwy/highway.h"
#include "rules/coordinates.h"

#if defined(ANYFLASH_CPU_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_SCORES_INL_H_
#undef ANYFLASH_CPU_SCORES_INL_H_
#else
#define ANYFLASH_CPU_SCORES_INL_H_
#endif

#include "cpu/rows-inl.h"
#include "cpu/tanh-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// True if scores are scale * Q K^T and nothing else, so that FinishScores is not needed.
inline bool PlainScores(const Problem& problem) {
  return problem.softcap <= 0 && !problem.bias.given() && !problem.alibi.given();
}

/// The factor of products that is applied as they become P: the scale, unless FinishScores has applied it. (Scaling the
/// queries beforehand could overflow where scores do not, and would round 16-bit queries once more.)
template <class T>
T ScaleLeft(const Problem& problem) {
  return PlainScores(problem) ? static_cast<T>(problem.scale) : T(1);
}

/// x becomes cap * tanh(x / cap); slope, if not null, the derivative 1 - tanh^2.
template <class T>
void CapScores(T scale, T cap, T* HWY_RESTRICT s, T* HWY_RESTRICT slope, std::int64_t count) {
  const hn::ScalableTag<T> d;
  const auto factor = hn::Set(d, scale), limit = hn::Set(d, cap), one = hn::Set(d, T(1));
  for (std::int64_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto x = hn::Div(hn::Mul(hn::Load(d, s + i), factor), limit);
    const auto t = CapTanh(d, x);
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

/// The biases of a key block: offsets in elements from those of a row.
struct BiasKeys {
  std::int64_t at[kTile];
  std::uint64_t inside = 0;  ///< keys outside have no bias
  bool side_by_side = true;  ///< all inside and contiguous in memory
  bool one_for_all = false;  ///< broadcast along the keys

  BiasKeys(const Bias& bias, const Box& keys, const Int3& k_size) : one_for_all(bias.stride[3] == 0) {
    for (int j = 0; j < kTile; ++j) {
      const Int3 c = keys.entry(j);
      const bool exists = rules::inside(c, k_size);
      inside |= std::uint64_t{exists} << j;
      at[j] = exists ? rules::flat_index(c, k_size) * bias.stride[3] : 0;
      side_by_side &= exists && at[j] == at[0] + j;
    }
  }
};

/// Adds the biases of one row, which begin at `row`, to its 64 scores; keys outside are left unchanged.
template <class T, class Memory>
HWY_INLINE void AddBiasRow(const Memory* row, const BiasKeys& keys, T* HWY_RESTRICT s) {
  const hn::ScalableTag<T> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  constexpr bool kVectors = sizeof(Memory) <= sizeof(T) && (sizeof(T) == 4 || sizeof(Memory) == 8);
  if (keys.one_for_all) {
    const auto x = hn::Set(d, hwy::ConvertScalarTo<T>(*row));
    for (int j = 0; j < kTile; j += lanes) hn::Store(hn::Add(hn::Load(d, s + j), x), d, s + j);
    return;
  }
  if constexpr (kVectors) {
    if (keys.side_by_side) {
      for (int j = 0; j < kTile; j += lanes)
        hn::Store(hn::Add(hn::Load(d, s + j), Convert<T, Memory>::Load(d, row + keys.at[0] + j)), d, s + j);
      return;
    }
  }
  for (auto left = keys.inside; left; left &= left - 1) {
    const int j = std::countr_zero(left);
    s[j] += hwy::ConvertScalarTo<T>(row[keys.at[j]]);
  }
}

/// Calls f with a null pointer of the bias's type.
template <class F>
HWY_INLINE void WithBiasType(ElementType type, const F& f) {
  if (type == ElementType::float64) return f(static_cast<double*>(nullptr));
  WithMemoryType<float>(type, f);
}

/// Adds the bias to the scores of a query box (rows, 64 keys).
template <class T>
void AddBias(const Problem& problem, std::int64_t b, std::int64_t h, const Box& queries, const Box& keys,
             std::int32_t rows, T* s) {
  const auto& bias = problem.bias;
  const BiasKeys key_places(bias, keys, problem.k_size);
  const auto base = b * bias.stride[0] + h * bias.stride[1];
  WithBiasType(bias.type, [&]<class Memory>(Memory*) HWY_ATTR {
    const auto* data = reinterpret_cast<const Memory*>(bias.data) + base;
    for (std::int32_t r = 0; r < rows; ++r) {
      const Int3 c = queries.entry(r);
      if (!rules::inside(c, problem.q_size)) continue;
      AddBiasRow(data + rules::flat_index(c, problem.q_size) * bias.stride[2], key_places, s + r * kTile);
    }
  });
}

/// Subtracts slope * sum_i |x_i - y_i|, in aligned coordinates (Press et al. 2022, in any number of dimensions).
/// Coordinates are counted from the first key's, so that they are small where distances are: a T cannot represent every
/// large integer.
template <class T>
void AddAlibi(const Problem& problem, const rules::Program& program, T slope, const Box& queries, const Box& keys,
              std::int32_t rows, T* s) {
  const hn::ScalableTag<T> d;
  HWY_ALIGN T y[3][kTile] = {};
  const auto origin = rules::key_coordinate(program, keys.origin);
  for (int j = 0; j < kTile; ++j) {
    const Int3 c = keys.entry(j);
    if (!rules::inside(c, program.k_size())) continue;
    const auto at = rules::key_coordinate(program, c);
    for (int i = 0; i < 3; ++i) y[i][j] = static_cast<T>(at[i] - origin[i]);
  }
  for (std::int32_t r = 0; r < rows; ++r) {
    const Int3 c = queries.entry(r);
    if (!rules::inside(c, problem.q_size)) continue;
    const auto at = rules::query_coordinate(program, c);
    for (int j = 0; j < kTile; j += static_cast<int>(hn::Lanes(d))) {
      auto distance = hn::Zero(d);
      for (int i = 3 - problem.dimensions; i < 3; ++i) {
        const auto x = hn::Set(d, static_cast<T>(at[i] - origin[i]));
        distance = hn::Add(distance, hn::Abs(hn::Sub(x, hn::Load(d, y[i] + j))));
      }
      T* row = s + r * kTile + j;
      hn::Store(hn::NegMulAdd(hn::Set(d, slope), distance, hn::Load(d, row)), d, row);
    }
  }
}

/// Turns s, (rows, 64) products of the first `rows` entries of a query box, into scores. slope: the same shape, the
/// soft cap's derivative, or null.
template <class T>
void FinishScores(const Problem& problem, const rules::Program& program, std::int64_t b, std::int64_t h,
                  const Box& queries, std::int32_t rows, const Box& keys, T* s, T* slope) {
  if (problem.softcap > 0) {
    CapScores(static_cast<T>(problem.scale), static_cast<T>(problem.softcap), s, slope, std::int64_t{rows} * kTile);
  } else {
    ScaleScores(static_cast<T>(problem.scale), s, std::int64_t{rows} * kTile);
  }
  if (problem.bias.given()) AddBias(problem, b, h, queries, keys, rows, s);
  if (problem.alibi.given()) {
    const auto slope_of_head = static_cast<T>(ReadHeadNumber(problem.alibi, b, h));
    AddAlibi(problem, program, slope_of_head, queries, keys, rows, s);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_SCORES_INL_H_
