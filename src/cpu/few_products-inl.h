// Products of a few rows with keys and values where they lie in memory, each of which is used once (for the tiles of
// AMX alone keys are packed). What comes next is asked for at the pace of use, so that memory is never idle: `ahead`,
// null where other rows have asked already.

#include <cstdint>

#include "cpu/ahead-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/rows-inl.h"
#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_FEW_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_FEW_PRODUCTS_INL_H_
#undef ANYFLASH_CPU_FEW_PRODUCTS_INL_H_
#else
#define ANYFLASH_CPU_FEW_PRODUCTS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

// Vectors of channels that a patch of the output is wide.
constexpr int kFewVectors = kGemmRows == 8 ? 4 : 2;

/// s (kRows, 64) = Q K^T for two vectors of keys, whose rows lie `line` apart; summed in the order of Gemm. E: T or
/// Pair; depth and line count E. k: E too, as numbers of the same size.
template <int kRows, class E, class T = SumOf<E>>
HWY_INLINE void ProductsOfKeys(const E* q, std::int64_t depth, const T* k, std::int64_t line, T* s,
                               Ahead* ahead) {
  const hn::ScalableTag<T> d;
  constexpr int lanes = static_cast<int>(hn::MaxLanes(d)), n = 16 / sizeof(T);
  hn::Vec<decltype(d)> sums[kRows][2];
  for (auto& row : sums) row[0] = row[1] = hn::Zero(d);
  for (std::int64_t c = 0; c < depth; c += n) {
    for (int half = 0; half < 2; ++half) {
      hn::Vec<decltype(d)> columns[n];
      LoadTransposed(d, k + half * lanes * line + c, line, columns);
      for (int i = 0; i < n; ++i)
        for (int r = 0; r < kRows; ++r) {
          const auto left = SetFactors(d, q[r * depth + c + i]);
          const auto right = hn::ResizeBitCast(hn::DFromV<decltype(left)>(), columns[i]);
          sums[r][half] = MulAddFactors<E>(d, left, right, sums[r][half]);
        }
    }
    if (ahead) ahead->fetch_lines(2 * lanes * 16 / 64);
  }
  for (int r = 0; r < kRows; ++r)
    for (int half = 0; half < 2; ++half) hn::StoreU(sums[r][half], d, s + r * kTile + half * lanes);
}

/// to (depth, 64) = 64 keys, whose rows lie `line` apart.
template <class T>
void TransposeKeys(const T* k, std::int64_t line, std::int64_t depth, T* to, Ahead& ahead) {
  const hn::ScalableTag<T> d;
  constexpr int lanes = static_cast<int>(hn::MaxLanes(d)), n = 16 / sizeof(T);
  for (int key = 0; key < kTile; key += lanes)
    for (std::int64_t c = 0; c < depth; c += n) {
      hn::Vec<decltype(d)> columns[n];
      LoadTransposed(d, k + key * line + c, line, columns);
      for (int i = 0; i < n; ++i) hn::Store(columns[i], d, to + (c + i) * kTile + key);
      ahead.fetch_lines(lanes * 16 / 64);
    }
}

/// out (kRows, ..) += P V over 64 keys and kVectors vectors of channels. p: (kRows, 64); v: rows `line` apart.
template <int kRows, int kVectors, class T, class Memory>
HWY_INLINE void AddValuesPatch(const T* p, const Memory* v, std::int64_t line, T* out, std::int64_t width,
                               Ahead* ahead) {
  const hn::ScalableTag<T> d;
  constexpr int lanes = static_cast<int>(hn::MaxLanes(d));
  hn::Vec<decltype(d)> sums[kRows][kVectors];
  for (auto& row : sums)
    for (auto& sum : row) sum = hn::Zero(d);
  for (int key = 0; key < kTile; ++key) {
    for (int i = 0; i < kVectors; ++i) {
      const auto values = Convert<T, Memory>::Load(d, v + key * line + i * lanes);
      for (int r = 0; r < kRows; ++r) sums[r][i] = hn::MulAdd(hn::Set(d, p[r * kTile + key]), values, sums[r][i]);
    }
    if (ahead) ahead->fetch_lines((kVectors * lanes * static_cast<int>(sizeof(Memory)) + 63) / 64);
  }
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kVectors; ++i) {
      T* const to = out + r * width + i * lanes;
      hn::Store(hn::Add(hn::Load(d, to), sums[r][i]), d, to);
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_FEW_PRODUCTS_INL_H_
