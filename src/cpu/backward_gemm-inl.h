// Products of the backward pass: C (64, n) = or += A (64, k) B (k, n), A with free strides, B and C in rows of whole vectors.

#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_BACKWARD_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_BACKWARD_GEMM_INL_H_
#undef ANYFLASH_CPU_BACKWARD_GEMM_INL_H_
#else
#define ANYFLASH_CPU_BACKWARD_GEMM_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

// Rows and vectors of C held in registers: 16 sums of 32 registers, 12 of 16.
#if HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64
constexpr int kGemmRows = 8;
#else
constexpr int kGemmRows = 6;
#endif
constexpr int kGemmVectors = 2;

template <bool kAdd, int kRows, int kVectors, class T>
HWY_INLINE void GemmPatch(std::int64_t k, const T* HWY_RESTRICT a, std::int64_t a_row, std::int64_t a_k,
                          const T* HWY_RESTRICT b, std::int64_t ldb, T* HWY_RESTRICT c, std::int64_t ldc) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(d);
  for (std::int64_t i = 0; i < k; ++i) {
    V right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = hn::Load(d, b + i * ldb + v * lanes);
    for (int r = 0; r < kRows; ++r) {
      const V left = hn::Set(d, a[r * a_row + i * a_k]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(left, right[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) {
      T* to = c + r * ldc + v * lanes;
      hn::Store(kAdd ? hn::Add(hn::Load(d, to), sums[r][v]) : sums[r][v], d, to);
    }
}

template <bool kAdd, int kVectors, class T>
HWY_NOINLINE void GemmColumns(std::int64_t k, const T* a, std::int64_t a_row, std::int64_t a_k, const T* b,
                              std::int64_t ldb, T* c, std::int64_t ldc) {
  int row = 0;
  for (; row + kGemmRows <= kTile; row += kGemmRows)
    GemmPatch<kAdd, kGemmRows, kVectors>(k, a + row * a_row, a_row, a_k, b, ldb, c + row * ldc, ldc);
  if constexpr (kTile % kGemmRows != 0)
    GemmPatch<kAdd, kTile % kGemmRows, kVectors>(k, a + row * a_row, a_row, a_k, b, ldb, c + row * ldc, ldc);
}

template <bool kAdd, class T>
void Gemm(std::int64_t k, std::int64_t n, const T* a, std::int64_t a_row, std::int64_t a_k, const T* b, std::int64_t ldb,
          T* c, std::int64_t ldc) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  std::int64_t col = 0;
  for (; col + kGemmVectors * lanes <= n; col += kGemmVectors * lanes)
    GemmColumns<kAdd, kGemmVectors>(k, a, a_row, a_k, b + col, ldb, c + col, ldc);
  for (; col < n; col += lanes) GemmColumns<kAdd, 1>(k, a, a_row, a_k, b + col, ldb, c + col, ldc);
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_BACKWARD_GEMM_INL_H_
