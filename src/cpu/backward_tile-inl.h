// One 64 x 64 tile of the backward pass between its products: from scores and dO V^T to P and dS.
//
//   P = exp(S - lse)      dS = P * (dP - delta + dlse)
//
// A large lse has a rounding error: its remainder is subtracted after it. Hidden pairs are zeroed by selection, so that
// a NaN there does not spread. With a soft cap, S before the bias is cap * tanh(x / cap), and the gradient with respect
// to x has the further factor 1 - tanh^2.

#include <algorithm>

#include "cpu/spans.h"
#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_BACKWARD_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_BACKWARD_TILE_INL_H_
#undef ANYFLASH_CPU_BACKWARD_TILE_INL_H_
#else
#define ANYFLASH_CPU_BACKWARD_TILE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

/// What turns the products of one tile into P and dS.
template <class T>
struct TileTerms {
  const T *lse, *rest;         ///< (64)
  const T *delta, *dlse;       ///< (64)
  const std::uint64_t* words;  ///< (64), or null where every pair is visible
  const Span* spans;           ///< with words, for each kSpanRows rows: the span that the products have filled
  int rows;                    ///< how many are wanted, an even number
  const T* slope;              ///< (64, 64): the soft cap's derivative, or null
  T score_scale;               ///< on s, as in the forward pass
  T gradient_scale;            ///< on dS
};

template <class T>
void ZeroOutside(std::size_t begin, std::size_t end, T* row, std::size_t width = kTile) {
  std::fill(row, row + begin, T(0));
  std::fill(row + end, row + width, T(0));
}

/// The exponent. A score exceeds its row's lse only by rounding: P is 1 then. A NaN stays.
template <class D, class V>
HWY_INLINE V AtMostZero(D d, V x) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128  // returns the second operand if one is a NaN
  return hn::Min(hn::Zero(d), x);
#else
  return hn::IfThenZeroElse(hn::Gt(x, hn::Zero(d)), x);
#endif
}

/// The terms that a row's pairs share.
template <class D, class T = hn::TFromD<D>>
struct RowOfTile {
  hn::Vec<D> lse, rest, delta, dlse;
  std::uint64_t word;

  RowOfTile(D d, const TileTerms<T>& terms, int row)
      : lse(hn::Set(d, terms.lse[row])),
        rest(hn::Set(d, terms.rest[row])),
        delta(hn::Set(d, terms.delta[row])),
        dlse(hn::Set(d, terms.dlse[row])),
        word(terms.words ? terms.words[row] : 0) {}
};

/// p, ds: a vector of each, at column `col` of a row; `at`: its offset in s, dp and the slope.
template <class Kind, class D, class V, class T>
HWY_INLINE void FinishVector(D d, const TileTerms<T>& terms, const RowOfTile<D>& row, std::size_t col, std::size_t at,
                             const T* s, const T* dp, V& p, V& ds) {
  const auto score = hn::Mul(hn::Load(d, s + at), hn::Set(d, terms.score_scale));
  auto distance = hn::Sub(score, row.lse);
  if constexpr (!Kind::plain) distance = hn::Sub(distance, row.rest);
  p = SoftmaxExp(d, AtMostZero(d, distance));
  [[maybe_unused]] auto visible = hn::FirstN(d, 0);
  if constexpr (Kind::masked) {
    const std::uint64_t bits = row.word >> col;
    visible = hn::LoadMaskBits(d, reinterpret_cast<const std::uint8_t*>(&bits));
    p = hn::IfThenElseZero(visible, p);
  }
  if constexpr (Kind::gradient) {
    auto change = hn::Sub(hn::Load(d, dp + at), row.delta);
    if constexpr (!Kind::plain) change = hn::Add(change, row.dlse);
    ds = hn::Mul(hn::Mul(p, hn::Set(d, terms.gradient_scale)), change);
    if constexpr (Kind::sloped) ds = hn::Mul(ds, hn::Load(d, terms.slope + at));
    if constexpr (Kind::masked) ds = hn::IfThenElseZero(visible, ds);
  }
}

/// Turns s and dp into P and dS.
template <class Kind, class T>
void FinishRows(const TileTerms<T>& terms, T* HWY_RESTRICT s, T* HWY_RESTRICT dp, Ahead& ahead) {
  const hn::ScalableTag<T> d;
  for (int row = 0; row < terms.rows; ++row) {
    const RowOfTile of_row(d, terms, row);
    const auto [begin, width] = Kind::masked ? terms.spans[row / tuning::kSpanRows] : Span{0, kTile};
    const auto end = static_cast<std::size_t>(begin + width);
    if constexpr (Kind::masked) {
      ZeroOutside(begin, end, s + row * kTile);
      if constexpr (Kind::gradient) ZeroOutside(begin, end, dp + row * kTile);
    }
    for (std::size_t col = begin; col < end; col += hn::Lanes(d)) {
      const auto at = row * kTile + col;
      auto p = hn::Zero(d), ds = p;
      FinishVector<Kind>(d, terms, of_row, col, at, s, dp, p, ds);
      hn::Store(p, d, s + at);
      if constexpr (Kind::gradient) hn::Store(ds, d, dp + at);
    }
    ahead.fetch(1);
  }
}

#if ANYFLASH_PAIRS
/// Turns the memory of s and dp into P and dS as Pairs of rows, (32, 64); ds_rows: dS as Pairs along each row, (64,
/// 32), ds_line apart.
template <class Kind>
void FinishPairs(const TileTerms<float>& terms, float* s, float* dp, Pair* ds_rows, std::int64_t ds_line,
                 Ahead& ahead) {
  const hn::ScalableTag<float> d;
  const hn::Repartition<hwy::bfloat16_t, decltype(d)> narrow;
  const hn::Half<decltype(narrow)> half;
  const PairsOfVectors interleave;
  auto *const p_to = reinterpret_cast<Pair*>(s), *const ds_to = reinterpret_cast<Pair*>(dp);
  auto* const neighbours = reinterpret_cast<hwy::bfloat16_t*>(ds_rows);
  const auto line = static_cast<std::size_t>(2 * ds_line);
  for (int row = 0; row < terms.rows; row += 2) {
    const RowOfTile first(d, terms, row), second(d, terms, row + 1);
    const auto [begin, width] = Kind::masked ? terms.spans[row / tuning::kSpanRows] : Span{0, kTile};
    const auto end = static_cast<std::size_t>(begin + width);
    for (std::size_t col = begin; col < end; col += hn::Lanes(d)) {
      const auto at = row * kTile + col, below = at + kTile, to = row / 2 * kTile + col;
      auto p0 = hn::Zero(d), p1 = p0, ds0 = p0, ds1 = p0;
      FinishVector<Kind>(d, terms, first, col, at, s, dp, p0, ds0);
      FinishVector<Kind>(d, terms, second, col, below, s, dp, p1, ds1);
      interleave.store(NarrowTwo(d, p0, p1), p_to + to);
      if constexpr (Kind::gradient) {
        const auto both = NarrowTwo(d, ds0, ds1);
        interleave.store(both, ds_to + to);
        hn::StoreU(hn::LowerHalf(half, both), half, neighbours + row * line + col);
        hn::StoreU(hn::UpperHalf(half, both), half, neighbours + (row + 1) * line + col);
      }
    }
    ahead.fetch(2);
    if constexpr (Kind::masked) {  // now, since the old contents have been read
      ZeroOutside(begin, end, p_to + row / 2 * kTile);
      if constexpr (Kind::gradient) {
        ZeroOutside(begin, end, ds_to + row / 2 * kTile);
        for (int i = row; i < row + 2; ++i) ZeroOutside(begin / 2, end / 2, ds_rows + i * ds_line, kTile / 2);
      }
    }
  }
}
#endif

/// plain: rest and dlse are 0 in every row.
template <bool kMasked, bool kGradient, bool kSlope, bool kPlain = false>
struct TileKind {
  static constexpr bool masked = kMasked, gradient = kGradient, sloped = kSlope, plain = kPlain;
};

template <class T>
bool AllZero(const T* of_rows) {
  bool any = false;
  for (int row = 0; row < kTile; ++row) any |= of_rows[row] != T(0);
  return !any;
}

/// Calls finish.operator()<Kind>() for a tile of these terms.
template <class T, class F>
void WithTileKind(const TileTerms<T>& terms, bool gradient, const F& finish) {
  // The most common case separately: its bits are the same.
  if (gradient && !terms.words && !terms.slope && AllZero(terms.rest) && AllZero(terms.dlse))
    return finish.template operator()<TileKind<false, true, false, true>>();
  const auto masked_or_not = [&]<bool kGradient, bool kSlope>() {
    terms.words ? finish.template operator()<TileKind<true, kGradient, kSlope>>()
                : finish.template operator()<TileKind<false, kGradient, kSlope>>();
  };
  if (!gradient) return masked_or_not.template operator()<false, false>();
  terms.slope ? masked_or_not.template operator()<true, true>() : masked_or_not.template operator()<true, false>();
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_BACKWARD_TILE_INL_H_
