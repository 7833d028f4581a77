// Products of few rows with keys and values, each of which is used once. Both are read in place; only for AMX are keys
// packed. Later rows are prefetched during reads of the current ones, so that memory is never idle.

#include <cstdint>

#include "cpu/gemm-inl.h"
#include "cpu/rows-inl.h"
#include "hwy/cache_control.h"
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

// Width in vectors of a patch of the output.
constexpr int kFewVectors = kGemmRows == 8 ? 4 : 2;

/// Prefetches the cache line `bytes` after `at`. `number`: the index of `at` in its row; only the first number of each
/// cache line prefetches. The address may be outside of the tensor.
template <class T>
HWY_INLINE void FetchAhead(const T* at, std::int64_t number, std::int64_t bytes) {
  if (bytes == 0 || number * static_cast<std::int64_t>(sizeof(T)) % 64 != 0) return;
  const auto address = reinterpret_cast<std::uintptr_t>(at) + static_cast<std::uintptr_t>(bytes);
  hwy::Prefetch(reinterpret_cast<const char*>(address));
}

/// What is prefetched while keys are read: nothing; the same channels of later rows; or as many bytes as are read, in
/// memory order, which needs rows without gaps.
enum class Fetch { nothing, of_rows, in_order };

/// sums += Q K^T over kColumns channels, from channel c on, of a vector of keys.
template <int kColumns, Fetch kFetch, int kRows, class E, class D, class V, class T>
HWY_INLINE void AddProductsOfKeys(D d, const E* q, std::int64_t depth, const T* k, std::int64_t line, std::int64_t c,
                                  V (&sums)[kRows], std::int64_t ahead) {
  V columns[kColumns];
  LoadColumns(d, k + c, line, columns);
  constexpr int lanes = static_cast<int>(hn::MaxLanes(d)), per_line = 64 / sizeof(T);
  if constexpr (kFetch == Fetch::of_rows)
    for (int key = 0; key < lanes; ++key) FetchAhead(k + key * line + c, c, ahead);
  if constexpr (kFetch == Fetch::in_order)
    for (int i = 0; i < kColumns * lanes; i += per_line) FetchAhead(k + c * lanes + i, c * lanes + i, ahead);
#pragma GCC unroll 16
  for (int i = 0; i < kColumns; ++i)
    for (int r = 0; r < kRows; ++r) {
      const auto left = SetFactors(d, q[r * depth + c + i]);
      const auto right = hn::ResizeBitCast(hn::DFromV<decltype(left)>(), columns[i]);
      sums[r] = MulAddFactors<E>(d, left, right, sums[r]);
    }
}

/// s (kRows, 64) = Q K^T for a vector of keys, whose rows lie `line` apart; summed in the order of Gemm. E: T or Pair;
/// depth and line count E. k: E too, as numbers of the same size. ahead: bytes from what is read to what is prefetched.
template <int kRows, Fetch kFetch, class E, class T = SumOf<E>>
HWY_INLINE void ProductsOfKeys(const E* q, std::int64_t depth, const T* k, std::int64_t line, T* s,
                               std::int64_t ahead) {
  const hn::ScalableTag<T> d;
  constexpr int lanes = static_cast<int>(hn::MaxLanes(d)), n = 16 / sizeof(T);
  hn::Vec<decltype(d)> sums[kRows];
  for (auto& sum : sums) sum = hn::Zero(d);
  std::int64_t c = 0;
  for (; c + lanes <= depth; c += lanes) AddProductsOfKeys<lanes, kFetch>(d, q, depth, k, line, c, sums, ahead);
  for (; c < depth; c += n) AddProductsOfKeys<n, kFetch>(d, q, depth, k, line, c, sums, ahead);
  for (int r = 0; r < kRows; ++r) hn::StoreU(sums[r], d, s + r * kTile);
}

/// The first columns of to (depth, 64) = so many keys, whole vectors, whose rows are `line` apart.
template <class T>
void TransposeKeys(int keys, const T* k, std::int64_t line, std::int64_t depth, T* to) {
  constexpr int lanes = static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
  for (int key = 0; key < keys; key += lanes) TransposeVectorOfRows(k + key * line, line, depth, to + key, kTile);
}

/// out (kRows, ..) += P V over some keys and kVectors vectors of channels. p: (kRows, 64); v: rows `line` apart.
template <int kRows, int kVectors, class T, class Memory>
HWY_INLINE void AddValuesPatch(int keys, const T* p, const Memory* v, std::int64_t line, T* out, std::int64_t width,
                               std::int64_t ahead) {
  const hn::ScalableTag<T> d;
  constexpr int lanes = static_cast<int>(hn::MaxLanes(d));
  hn::Vec<decltype(d)> sums[kRows][kVectors];
  for (auto& row : sums)
    for (auto& sum : row) sum = hn::Zero(d);
  for (int key = 0; key < keys; ++key)
    for (int i = 0; i < kVectors; ++i) {
      const Memory* const from = v + key * line + i * lanes;
      const auto values = Convert<T, Memory>::Load(d, from);
      FetchAhead(from, i * lanes, ahead);
      for (int r = 0; r < kRows; ++r) sums[r][i] = hn::MulAdd(hn::Set(d, p[r * kTile + key]), values, sums[r][i]);
    }
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kVectors; ++i) {
      T* const to = out + r * width + i * lanes;
      hn::Store(hn::Add(hn::Load(d, to), sums[r][i]), d, to);
    }
}
/// The same for all channels.
template <int kRows, class T, class Memory>
HWY_INLINE void AddValues(int keys, const T* p, const Memory* v, std::int64_t line, std::int64_t width, T* out,
                          std::int64_t ahead) {
  constexpr int lanes = static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
  std::int64_t c = 0;
  for (; c + kFewVectors * lanes <= width; c += kFewVectors * lanes)
    AddValuesPatch<kRows, kFewVectors>(keys, p, v + c, line, out + c, width, ahead);
  for (; c < width; c += lanes) AddValuesPatch<kRows, 1>(keys, p, v + c, line, out + c, width, ahead);
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_FEW_PRODUCTS_INL_H_
