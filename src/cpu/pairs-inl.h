// Rows of float32 as Pairs of bfloat16 (gemm-inl.h), accesses to single numbers of either, and which calls use them.

#include <bit>
#include <cstdint>

#include "cpu/backend.h"
#include "cpu/gemm-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/workspace.h"
#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_PAIRS_INL_H_
#undef ANYFLASH_CPU_PAIRS_INL_H_
#else
#define ANYFLASH_CPU_PAIRS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

template <class E>
HWY_INLINE float NumberOf(E pair, std::int64_t which) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(pair) >> 16 * (which & 1) << 16);
}
/// Number i of a row.
template <class E>
HWY_INLINE SumOf<E> InRow(const E* row, std::int64_t i) {
  if constexpr (kIsPair<E>) {
    return NumberOf(row[i / 2], i);
  } else {
    return row[i];
  }
}
/// Number c of row i of a matrix whose rows are paired or not.
template <class E>
HWY_INLINE SumOf<E> InColumn(const E* matrix, std::int64_t width, std::int64_t i, std::int64_t c) {
  if constexpr (kIsPair<E>) {
    return NumberOf(matrix[i / 2 * width + c], i);
  } else {
    return matrix[i * width + c];
  }
}

/// to (32, width): row pairs, with zeros for the rows `bad` of 64.
inline void CleanPairs(const Pair* rows, std::int64_t width, std::uint64_t bad, Pair* to) {
  for (std::int64_t row = 0; row < kTile / 2; ++row) {
    const std::uint32_t keep = (bad >> 2 * row & 1 ? 0u : 0xffffu) | (bad >> (2 * row + 1) & 1 ? 0u : 0xffff0000u);
    for (std::int64_t i = row * width; i < (row + 1) * width; ++i)
      to[i] = Pair{static_cast<std::uint32_t>(rows[i]) & keep};
  }
}

/// rows (kRows, width) -> to (width, kRows).
template <int kRows = kTile>
void TransposeWords(const Pair* rows, std::int64_t width, Pair* to) {
  TransposeRows<kRows>(reinterpret_cast<const float*>(rows), width, reinterpret_cast<float*>(to));
}

#if ANYFLASH_PAIRS

/// Rounds count numbers (whole pairs of vectors) to nearest; neighbours make a pair. `to` may be `from` itself.
inline void PairNeighbours(const float* from, std::int64_t count, Pair* to) {
  const hn::ScalableTag<float> d;
  const hn::Repartition<hwy::bfloat16_t, decltype(d)> narrow;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < count; i += 2 * lanes) {
    const auto pairs = NarrowTwo(d, hn::Load(d, from + i), hn::Load(d, from + i + lanes));
    hn::Store(pairs, narrow, reinterpret_cast<hwy::bfloat16_t*>(to + i / 2));
  }
}

/// Two consecutive vectors in `both`, as Pairs of their numbers at the same index.
class PairsOfVectors {
 public:
  PairsOfVectors() {
    HWY_ALIGN std::uint16_t order[hn::MaxLanes(Bits())];
    const auto lanes = hn::Lanes(Bits()) / 2;
    for (std::size_t i = 0; i < lanes; ++i) {
      order[2 * i] = static_cast<std::uint16_t>(i);
      order[2 * i + 1] = static_cast<std::uint16_t>(i + lanes);
    }
    indices_ = hn::SetTableIndices(Bits(), order);
  }
  template <class V>
  HWY_INLINE void store(V both, Pair* to) const {
    const auto pairs = hn::TableLookupLanes(hn::BitCast(Bits(), both), indices_);
    hn::Store(pairs, Bits(), reinterpret_cast<std::uint16_t*>(to));
  }

 private:
  using Bits = hn::ScalableTag<std::uint16_t>;
  decltype(hn::SetTableIndices(Bits(), static_cast<const std::uint16_t*>(nullptr))) indices_;
};

/// from (count, width), rounded to nearest -> to (count / 2, width): rows 2 i and 2 i + 1 make a row of pairs.
inline void PairRows(const float* from, std::int64_t width, Pair* to, int count = kTile) {
  const hn::ScalableTag<float> d;
  const PairsOfVectors interleave;
  for (std::int64_t row = 0; row < count; row += 2)
    for (std::int64_t c = 0; c < width; c += static_cast<std::int64_t>(hn::Lanes(d))) {
      const float* at = from + row * width + c;
      const auto both = NarrowTwo(d, hn::Load(d, at), hn::Load(d, at + width));
      interleave.store(both, to + row / 2 * width + c);
    }
}

/// Sums a[i] b[i] over `depth` Pairs for a vector of columns, 64 columns in a row, in the order of Gemm.
template <class D>
hn::Vec<D> DotColumns(D d, const Pair* a, const Pair* b, std::int64_t depth) {
  auto total = hn::Zero(d);
#if ANYFLASH_PAIRS_IN_TILES  // first and second numbers separately, sixteen pairs at a time
  const hn::RebindToUnsigned<D> words;
  const auto load = [&](const Pair* from)
                        HWY_ATTR { return hn::Load(words, reinterpret_cast<const std::uint32_t*>(from)); };
  const auto first = [&](auto pairs) HWY_ATTR { return hn::BitCast(d, hn::ShiftLeft<16>(pairs)); };
  const auto second = [&](auto pairs) HWY_ATTR { return hn::BitCast(d, hn::And(pairs, hn::Set(words, 0xffff0000u))); };
  for (std::int64_t i = 0; i < depth; i += 16) {
    auto firsts = hn::Zero(d), seconds = hn::Zero(d);
    for (auto k = i; k < std::min(i + 16, depth); ++k) {
      const auto left = load(a + k * kTile), right = load(b + k * kTile);
      firsts = hn::MulAdd(first(left), first(right), firsts);
      seconds = hn::MulAdd(second(left), second(right), seconds);
    }
    total = hn::Add(total, hn::Add(firsts, seconds));
  }
#else
  for (std::int64_t i = 0; i < depth; ++i)
    total = MulAddFactors<Pair>(d, LoadFactors(d, a + i * kTile), LoadFactors(d, b + i * kTile), total);
#endif
  return total;
}

#endif  // ANYFLASH_PAIRS

/// rows (count, width), which may be changed, to the first columns of (width, 64), Pairs along the width. count: whole
/// vectors.
template <class E, class T>
void TransposeOperand(T* rows, std::int64_t width, E* to, int count = kTile) {
  constexpr int lanes = static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
  if constexpr (kIsPair<E>) PairNeighbours(rows, count * width, reinterpret_cast<Pair*>(rows));
  const auto depth = Depth<E>(width);
  for (int row = 0; row < count; row += lanes)
    TransposeVectorOfRows(rows + row * depth, depth, depth, reinterpret_cast<T*>(to) + row, kTile);
}

/// run<T, E>(): T is the type of a call's computation, E that of its products' operands.
template <class F>
std::int64_t WithElements(const Problem& problem, const F& run) {
  if (problem.type == ElementType::float64) return run.template operator()<double, double>();
#if ANYFLASH_PAIRS
  if (problem.type == ElementType::bfloat16 && (HWY_NATIVE_DOT_BF16 || tiles_in_use()))
    return run.template operator()<float, Pair>();
#endif
  return run.template operator()<float, float>();
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_PAIRS_INL_H_
