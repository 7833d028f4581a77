// The online softmax (Milakov and Gimelshein 2018) on one tile: rows of 64 scores become P, and each row's maximum, sum
// and output are updated.

#include <algorithm>
#include <cmath>

#include "cpu/gemm-inl.h"
#include "cpu/tuning.h"
#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_SOFTMAX_INL_H_
#undef ANYFLASH_CPU_SOFTMAX_INL_H_
#else
#define ANYFLASH_CPU_SOFTMAX_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

/// A row's shift before any score exceeds it. It is finite, so that exp(-inf - shift) is 0.
template <class T>
constexpr T kNoShift = std::numeric_limits<T>::lowest();

constexpr int kSumLanes = 16;

/// The statistics of a row's exponentials.
template <class T>
struct RowEnd {
  T largest, sum;  ///< the maximum of the scores (or a stand-in for it), the sum of exp(score - largest)

  T lse() const { return sum == 0 ? -kInfinity<T> : largest + std::log(sum); }
};

/// The state of a query block from key block to key block. A row's sum and maximum are kept as vectors, each lane over
/// some of its keys, so that no tile needs a sum across lanes.
template <class T>
struct RowState {
  T* shift;    ///< (rows): subtracted from scores before exp: the maximum, or at most kShiftLag less, or above
  T* row_max;  ///< (rows, kSumLanes)
  T* row_sum;  ///< (rows, kSumLanes): of exp(score - shift)
  T* out;      ///< (rows, width): the sum of P V, not yet divided
  std::int64_t width;
  T scale = 1;          ///< of scores
  T* factor = nullptr;  ///< (rows): of P, in a second walk

  void clear(std::int64_t rows) const {
    std::fill_n(shift, rows, kNoShift<T>);
    std::fill_n(row_max, rows * kSumLanes, -kInfinity<T>);
    std::fill_n(row_sum, rows * kSumLanes, T(0));
    std::fill_n(out, rows * width, T(0));
  }
  /// For a second walk, whose P is scaled to sum to a half, so that no sum of P V exceeds the values. (A shift above
  /// lse would do the same, but for large scores the next larger number is much above it.)
  void clear(std::int64_t rows, const RowEnd<T>* ends) const {
    clear(rows);
    for (std::int64_t row = 0; row < rows; ++row) {
      shift[row] = std::max(ends[row].largest, kNoShift<T>);
      factor[row] = T(0.5) / ends[row].sum;  // a sum of 0: its results, 0, are kept
    }
  }
};

template <class T>
HWY_INLINE void Rescale(T factor, T* HWY_RESTRICT row, std::int64_t width) {
  const hn::ScalableTag<T> d;
  const auto f = hn::Set(d, factor);
  for (std::int64_t i = 0; i < width; i += hn::Lanes(d)) hn::Store(hn::Mul(hn::Load(d, row + i), f), d, row + i);
}

/// Rescales a row's sums by exp(difference), because its shift has risen. A separate function, since it is rare.
template <class T>
HWY_NOINLINE void ScaleDown(T difference, std::int64_t row, const RowState<T>& state) {
  const hn::ScalableTag<T> d;
  const T factor = hn::GetLane(SoftmaxExp(d, hn::Set(d, difference)));
  Rescale(factor, state.row_sum + row * kSumLanes, kSumLanes);
  Rescale(factor, state.out + row * state.width, state.width);
}

/// The end of a row: its sums are rescaled to its maximum.
template <class T>
RowEnd<T> SettleRow(std::int64_t row, const RowState<T>& state) {
  const hn::ScalableTag<T> d;
  auto largest = hn::Set(d, -kInfinity<T>), total = hn::Zero(d);
  for (std::size_t i = 0; i < kSumLanes; i += hn::Lanes(d))
    largest = hn::Max(largest, hn::Load(d, state.row_max + row * kSumLanes + i));
  const T row_max = hn::ReduceMax(d, largest);
  if (row_max > state.shift[row]) ScaleDown(state.shift[row] - row_max, row, state);
  for (std::size_t i = 0; i < kSumLanes; i += hn::Lanes(d))
    total = hn::Add(total, hn::Load(d, state.row_sum + row * kSumLanes + i));
  return {row_max, hn::ReduceSum(d, total)};
}

/// p: kWidth numbers. `to` may be the scores' memory.
template <int kVectors, class D, class V, class E>
HWY_INLINE void StoreP(D d, const V (&p)[kVectors], E* to) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  if constexpr (!kIsPair<E>) {
    for (int i = 0; i < kVectors; ++i) hn::Store(p[i], d, to + i * lanes);
  } else {
    auto* const numbers = reinterpret_cast<hwy::bfloat16_t*>(to);
    const hn::Repartition<hwy::bfloat16_t, D> narrow;
    const hn::Half<decltype(narrow)> half;
    for (int i = 0; i + 1 < kVectors; i += 2) hn::StoreU(NarrowTwo(d, p[i], p[i + 1]), narrow, numbers + i * lanes);
    if constexpr (kVectors % 2 == 1)
      hn::StoreU(hn::LowerHalf(half, NarrowTwo(d, p[kVectors - 1], p[kVectors - 1])), half,
                 numbers + (kVectors - 1) * lanes);
  }
}

/// Calls run.operator()<width>() for a width that is a multiple of kSpanStep.
template <class F>
HWY_INLINE void WithWidth(int width, const F& run) {
  using tuning::kSpanStep;
  static_assert(kTile == 4 * kSpanStep);
  switch (width / kSpanStep) {
    case 1: return run.template operator()<kSpanStep>();
    case 2: return run.template operator()<2 * kSpanStep>();
    case 3: return run.template operator()<3 * kSpanStep>();
    default: return run.template operator()<kTile>();
  }
}

/// s: kWidth scores of a row; p: their P, may be s. word: which of them are visible, from bit 0 (used only if kMasked).
template <bool kMasked, int kWidth, class T, class E>
HWY_INLINE void SoftmaxRow(std::uint64_t word, const T* s, E* p, std::int64_t row, const RowState<T>& state) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(d)), kVectors = kWidth / kLanes;
  V x[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    x[i] = hn::Mul(hn::Load(d, s + i * kLanes), hn::Set(d, state.scale));
    if constexpr (kMasked) {
      const std::uint64_t bits = word >> (i * kLanes);
      const auto visible = hn::LoadMaskBits(d, reinterpret_cast<const std::uint8_t*>(&bits));
      x[i] = hn::IfThenElse(visible, x[i], hn::Set(d, -kInfinity<T>));
    }
  }
  V largest = x[0];
  for (int i = 1; i < kVectors; ++i) largest = hn::Max(largest, x[i]);
  T* const maxima = state.row_max + row * kSumLanes;
  const V before = hn::Load(d, maxima);
  hn::Store(hn::IfThenElse(hn::Gt(largest, before), largest, before), d, maxima);  // a NaN is ignored
  const V most = hn::Add(hn::Set(d, state.shift[row]), hn::Set(d, T(tuning::kShiftLag)));
  if (HWY_UNLIKELY(!hn::AllFalse(d, hn::Gt(largest, most)))) {
    const T tile_max = hn::ReduceMax(d, largest), old_shift = state.shift[row];
    if (tile_max > old_shift) {
      const bool first = hn::AllFalse(d, hn::Gt(before, hn::Set(d, -kInfinity<T>)));
      if (!first) ScaleDown(old_shift - tile_max, row, state);
      state.shift[row] = tile_max;
    }
  }
  const V shift = hn::Set(d, state.shift[row]);
  for (int i = 0; i < kVectors; ++i) x[i] = SoftmaxExp(d, hn::Sub(x[i], shift));
  V sum = x[0];
  for (int i = 1; i < kVectors; ++i) sum = hn::Add(sum, x[i]);
  if (HWY_UNLIKELY(state.factor != nullptr))
    for (int i = 0; i < kVectors; ++i) x[i] = hn::Mul(x[i], hn::Set(d, state.factor[row]));
  StoreP(d, x, p);
  T* sums = state.row_sum + row * kSumLanes;
  hn::Store(hn::Add(hn::Load(d, sums), sum), d, sums);
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_SOFTMAX_INL_H_
