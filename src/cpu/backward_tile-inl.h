// One 64 x 64 tile of the backward pass between its matrix products: from scores and dO V^T to P and dS.
//
//   P = exp(S - lse)      dS = P * (dP - delta + dlse)
//
// Pairs that the mask hides are zeroed by selection, so that a NaN there goes nowhere. With a soft cap, S before the
// bias is cap * tanh(x / cap), and the gradient with respect to x has the further factor 1 - tanh^2.

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
  const T* lse;                ///< (64)
  const T *delta, *dlse;       ///< (64)
  const std::uint64_t* words;  ///< (64), or null where every pair is visible
  const Span* spans;           ///< with words, for each kSpanRows rows: what the products have filled
  const T* slope;              ///< (64, 64): the soft cap's derivative, or null
  T score_scale;               ///< on s, if E is Pair: the product is rounded, as in the forward pass
  T gradient_scale;            ///< on dS
};

template <class T>
void ZeroOutside(std::size_t begin, std::size_t end, T* row) {
  std::fill(row, row + begin, T(0));
  std::fill(row + end, row + kTile, T(0));
}

/// A score lies above its row's lse by a rounding at most. Where scores are large that may be much: P is 1 then. A NaN
/// stays.
template <class D, class V>
HWY_INLINE V AtMostZero(D d, V x) {
  return hn::IfThenZeroElse(hn::Gt(x, hn::Zero(d)), x);
}

template <class E, class T, bool kMasked, bool kGradient, bool kSlope>
void FinishTileRows(const TileTerms<T>& terms, T* HWY_RESTRICT s, T* HWY_RESTRICT dp) {
  const hn::ScalableTag<T> d;
  const auto score_scale = hn::Set(d, terms.score_scale), gradient_scale = hn::Set(d, terms.gradient_scale);
  for (int row = 0; row < kTile; ++row) {
    const auto lse = hn::Set(d, terms.lse[row]);
    const auto delta = hn::Set(d, terms.delta[row]), dlse = hn::Set(d, terms.dlse[row]);
    const auto [begin, width] = kMasked ? terms.spans[row / tuning::kSpanRows] : Span{0, kTile};
    const auto end = static_cast<std::size_t>(begin + width);
    if constexpr (kMasked) {
      ZeroOutside(begin, end, s + row * kTile);
      if constexpr (kGradient) ZeroOutside(begin, end, dp + row * kTile);
    }
    for (std::size_t col = begin; col < end; col += hn::Lanes(d)) {
      const auto at = row * kTile + col;
      auto score = hn::Load(d, s + at);
      if constexpr (kIsPair<E>) score = hn::Mul(score, score_scale);
      auto p = SoftmaxExp(d, AtMostZero(d, hn::Sub(score, lse)));
      [[maybe_unused]] auto visible = hn::FirstN(d, 0);
      if constexpr (kMasked) {
        const std::uint64_t bits = terms.words[row] >> col;
        visible = hn::LoadMaskBits(d, reinterpret_cast<const std::uint8_t*>(&bits));
        p = hn::IfThenElseZero(visible, p);
      }
      hn::Store(p, d, s + at);
      if constexpr (kGradient) {
        auto ds = hn::Mul(hn::Mul(p, gradient_scale), hn::Add(hn::Sub(hn::Load(d, dp + at), delta), dlse));
        if constexpr (kSlope) ds = hn::Mul(ds, hn::Load(d, terms.slope + at));
        if constexpr (kMasked) ds = hn::IfThenElseZero(visible, ds);
        hn::Store(ds, d, dp + at);
      }
    }
  }
}

/// s: (64, 64) scores, becomes P. dp: (64, 64) dO V^T, becomes gradient_scale * slope * dS; may be null.
template <class E, class T>
void FinishTile(const TileTerms<T>& terms, T* s, T* dp) {
  if (dp == nullptr) {
    terms.words ? FinishTileRows<E, T, true, false, false>(terms, s, dp)
                : FinishTileRows<E, T, false, false, false>(terms, s, dp);
  } else if (terms.slope) {
    terms.words ? FinishTileRows<E, T, true, true, true>(terms, s, dp)
                : FinishTileRows<E, T, false, true, true>(terms, s, dp);
  } else {
    terms.words ? FinishTileRows<E, T, true, true, false>(terms, s, dp)
                : FinishTileRows<E, T, false, true, false>(terms, s, dp);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_BACKWARD_TILE_INL_H_
