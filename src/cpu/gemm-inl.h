// The one micro-kernel: C (rows, n) = or += A (rows, k) B (k, n).
//
// A is read one number at a time, broadcast over a vector, and may have any strides, so that a transposed A costs
// nothing. B and C are rows of whole vectors. A patch of C stays in registers while k runs; B's rows stream from the
// nearest cache.
//
// Numbers are of the compute type, or Pairs: two bfloat16, consecutive along k, in one word. Machines with an
// instruction for them multiply and sum them in float32 at twice the rate. k then counts Pairs.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/amx.h"
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
// Patches of wide rows, which load fewer numbers for each product. Measured on Intel cores: docs/notes/cpu-forward.md.
#undef ANYFLASH_WIDE_PATCHES
#define ANYFLASH_WIDE_PATCHES (HWY_TARGET == HWY_AVX3)
constexpr int kWideRows = 6, kWideVectors = 4;

// Whether kernels of this instruction set can be asked for Pairs: multiplied by an instruction of the set, or with AVX3
// by AMX tiles, where the machine has them. (Tiles need left operands in rows: a_k is 1.)
#undef ANYFLASH_PAIRS
#undef ANYFLASH_PAIRS_IN_TILES
#define ANYFLASH_PAIRS_IN_TILES (HWY_TARGET == HWY_AVX3)
#define ANYFLASH_PAIRS (HWY_NATIVE_DOT_BF16 || ANYFLASH_PAIRS_IN_TILES)

/// The lower half is the first of the two.
enum class Pair : std::uint32_t {};
template <class E>
constexpr bool kIsPair = std::is_same_v<E, Pair>;
/// Whether AMX tiles multiply E.
template <class E>
constexpr bool kInTiles = kIsPair<E> && ANYFLASH_PAIRS_IN_TILES;
/// The type in which products of E are summed.
template <class E>
using SumOf = std::conditional_t<kIsPair<E>, float, E>;
/// How many E hold `count` numbers.
template <class E>
constexpr std::int64_t Depth(std::int64_t count) {
  return kIsPair<E> ? (count + 1) / 2 : count;
}

template <class D, class E>
HWY_INLINE auto LoadFactors(D d, const E* from) {
  if constexpr (kIsPair<E>) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(from);
    return hn::BitCast(hn::Repartition<hwy::bfloat16_t, D>(), hn::Load(hn::RebindToUnsigned<D>(), words));
  } else {
    return hn::Load(d, from);
  }
}
template <class D, class E>
HWY_INLINE auto SetFactors(D d, E x) {
  if constexpr (kIsPair<E>) {
    return hn::BitCast(hn::Repartition<hwy::bfloat16_t, D>(), hn::Set(hn::RebindToUnsigned<D>(), std::uint32_t(x)));
  } else {
    return hn::Set(d, x);
  }
}
template <class E, class D, class V, class Sum>
HWY_INLINE Sum MulAddFactors(D d, V left, V right, Sum sum) {
  if constexpr (kIsPair<E>) {
    auto unused = hn::Zero(d);
    return hn::ReorderWidenMulAccumulate(d, left, right, sum, unused);
  } else {
    return hn::MulAdd(left, right, sum);
  }
}

#if ANYFLASH_PAIRS
/// Two vectors of float as one of bfloat16, the first in its lower half, rounded to nearest.
template <class D, class V = hn::Vec<D>, class DN = hn::Repartition<hwy::bfloat16_t, D>>
HWY_INLINE hn::Vec<DN> NarrowTwo(D, V lower, V upper) {
#if ANYFLASH_PAIRS_IN_TILES  // every machine with the tiles has this instruction, although AVX3 does not imply it
  hn::Vec<DN> narrow;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(narrow.raw) : "v"(lower.raw), "v"(upper.raw));
  return narrow;
#else
  return hn::OrderedDemote2To(DN(), lower, upper);
#endif
}
#endif

/// Hides from the compiler what x is made of: it computes it once.
template <class X>
HWY_INLINE X Opaque(X x) {
  asm("" : "+r"(x));
  return x;
}

// A function of its own with one pointer for all rows: with too few registers GCC keeps addresses in vectors, where
// they wait for the multiply-adds before them. k is at least 1: with a path for 0, GCC keeps the sums in memory before
// and after the loop. The offsets are those that addresses of one, two and four times a register do not reach.
template <bool kAdd, int kRows, int kVectors, class E, class T = SumOf<E>>
HWY_NOINLINE void GemmPatch(std::int64_t k, const E* HWY_RESTRICT a, std::int64_t a_row, std::int64_t a_k,
                            const E* HWY_RESTRICT b, std::int64_t ldb, T* HWY_RESTRICT c, std::int64_t ldc) {
  const hn::ScalableTag<T> d;
  using V = hn::Vec<decltype(d)>;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(d);
  static_assert(kRows <= 8);
  const auto of_rows = [&](std::int64_t rows) { return Opaque(rows * a_row * std::int64_t{sizeof(E)}); };
  const auto one = of_rows(1), three = of_rows(3), five = of_rows(5), seven = of_rows(7);
  do {
    decltype(LoadFactors(d, b)) right[kVectors];
    for (int v = 0; v < kVectors; ++v) right[v] = LoadFactors(d, b + v * lanes);
    for (int r = 0; r < kRows; ++r) {
      const auto offset = r == 3 ? three : r == 5 ? five : r == 6 ? 2 * three : r == 7 ? seven : r * one;
      const auto left = SetFactors(d, *reinterpret_cast<const E*>(reinterpret_cast<const char*>(a) + offset));
      for (int v = 0; v < kVectors; ++v) sums[r][v] = MulAddFactors<E>(d, left, right[v], sums[r][v]);
    }
    a = Opaque(a + a_k), b = Opaque(b + ldb);
  } while (--k);
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) {
      T* to = c + r * ldc + v * lanes;
      hn::Store(kAdd ? hn::Add(hn::Load(d, to), sums[r][v]) : sums[r][v], d, to);
    }
}

template <bool kAdd, int kVectors, class E, class T = SumOf<E>>
HWY_NOINLINE void GemmColumns(std::int64_t rows, std::int64_t k, const E* a, std::int64_t a_row, std::int64_t a_k,
                              const E* b, std::int64_t ldb, T* c, std::int64_t ldc) {
  std::int64_t row = 0;
  const auto patches = [&]<int kRows>() {
    for (; row + kRows <= rows && (kRows != 6 || rows - row != 8); row += kRows)  // 8 are twice 4
      GemmPatch<kAdd, kRows, kVectors>(k, a + row * a_row, a_row, a_k, b, ldb, c + row * ldc, ldc);
  };
  patches.template operator()<kVectors == kWideVectors ? kWideRows : kGemmRows>();
  patches.template operator()<4>();
  patches.template operator()<1>();
}

template <bool kAdd, class E, class T = SumOf<E>>
void Gemm(std::int64_t rows, std::int64_t k, std::int64_t n, const E* a, std::int64_t a_row, std::int64_t a_k,
          const E* b, std::int64_t ldb, T* c, std::int64_t ldc) {
  if (k == 0) {
    for (std::int64_t row = 0; !kAdd && row < rows; ++row) std::fill_n(c + row * ldc, n, T(0));
    return;
  }
#if ANYFLASH_PAIRS_IN_TILES
  if constexpr (kIsPair<E>) {
    const auto words = [](const E* pairs) { return reinterpret_cast<const std::uint32_t*>(pairs); };
    const amx::Factors factors[] = {{words(a), words(b)}};
    return amx::multiply(kAdd, rows, k, n, factors, a_row, ldb, c, ldc);
  }
#endif
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  std::int64_t col = 0;
#if ANYFLASH_WIDE_PATCHES
  for (; col + kWideVectors * lanes <= n; col += kWideVectors * lanes)
    GemmColumns<kAdd, kWideVectors>(rows, k, a, a_row, a_k, b + col, ldb, c + col, ldc);
#endif
  for (; col + kGemmVectors * lanes <= n; col += kGemmVectors * lanes)
    GemmColumns<kAdd, kGemmVectors>(rows, k, a, a_row, a_k, b + col, ldb, c + col, ldc);
  for (; col < n; col += lanes) GemmColumns<kAdd, 1>(rows, k, a, a_row, a_k, b + col, ldb, c + col, ldc);
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_GEMM_INL_H_
