// The one micro-kernel: C (rows, n) = or += A (rows, k) B (k, n).
//
// A is read one number at a time, broadcast over a vector, and may have any strides, so that a transposed A costs
// nothing. B and C are rows of whole vectors. A patch of C stays in registers while k runs; B's rows stream from the
// nearest cache.

#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_GEMM_INL_H_
#undef ANYFLASH_CPU_GEMM_INL_H_
#else
#define ANYFLASH_CPU_GEMM_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Rows and vectors of a patch: 16 sums of 32 registers, 12 of 16.
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
HWY_NOINLINE void GemmColumns(std::int64_t rows, std::int64_t k, const T* a, std::int64_t a_row, std::int64_t a_k,
                              const T* b, std::int64_t ldb, T* c, std::int64_t ldc) {
  std::int64_t row = 0;
  const auto patches = [&]<int kRows>() {
    for (; row + kRows <= rows; row += kRows)
      GemmPatch<kAdd, kRows, kVectors>(k, a + row * a_row, a_row, a_k, b, ldb, c + row * ldc, ldc);
  };
  patches.template operator()<kGemmRows>();
  patches.template operator()<4>();
  patches.template operator()<1>();
}

template <bool kAdd, class T>
void Gemm(std::int64_t rows, std::int64_t k, std::int64_t n, const T* a, std::int64_t a_row, std::int64_t a_k,
          const T* b, std::int64_t ldb, T* c, std::int64_t ldc) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  std::int64_t col = 0;
  for (; col + kGemmVectors * lanes <= n; col += kGemmVectors * lanes)
    GemmColumns<kAdd, kGemmVectors>(rows, k, a, a_row, a_k, b + col, ldb, c + col, ldc);
  for (; col < n; col += lanes) GemmColumns<kAdd, 1>(rows, k, a, a_row, a_k, b + col, ldb, c + col, ldc);
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_GEMM_INL_H_
