// The products of decoding, which read keys and values where they lie, against plain loops, on every instruction set.
#include <cmath>
#include <limits>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "few_products_test.cpp"
#include "hwy/foreach_target.h"

#include "pieces_support.h"

#include "cpu/numbers.h"
#include "cpu/workspace.h"

#include "hwy/highway.h"

#include "cpu/exp-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/pairs-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/few_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

/// The sum of `count` products, and what its error may be in proportion to.
template <class F>
void ExpectSum(double got, double before, std::int64_t count, double epsilon, const F& product) {
  double sum = before, size = 1;
  for (std::int64_t i = 0; i < count; ++i) sum += product(i), size += std::fabs(product(i));
  ASSERT_NEAR(got, sum, size * epsilon * 8);
}

template <int kRows, class T>
void CheckKeys(std::int64_t depth, std::int64_t gap) {
  constexpr int keys = static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
  const auto line = depth + gap;
  const Matrix<T> q(kRows, depth, 1), k(kTile, line, 2);
  Matrix<T> s(kRows, kTile, 3);
  const Matrix<T> before(kRows, kTile, 3);
  const auto run = [&]<Fetch kFetch>(int first) HWY_ATTR {
    ProductsOfKeys<kRows, kFetch>(q.data.get(), depth, k.data.get() + first * line, line, s.data.get() + first, 64);
  };
  for (int first = 0; first + keys <= kTile - keys; first += keys) {  // all but the last keys
    if (first == 0) {
      run.template operator()<Fetch::of_rows>(first);
    } else {
      gap == 0 ? run.template operator()<Fetch::in_order>(first) : run.template operator()<Fetch::nothing>(first);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int key = 0; key < kTile; ++key) {
      const T got = s.data[r * kTile + key];
      if (key >= kTile - keys) {
        ASSERT_EQ(got, before.data[r * kTile + key]);  // as it was
        continue;
      }
      ExpectSum(got, 0, depth, std::numeric_limits<T>::epsilon(),
                [&](std::int64_t c) { return double(q.data[r * depth + c]) * double(k.data[key * line + c]); });
    }
}

#if HWY_NATIVE_DOT_BF16
/// Keys of bfloat16, which may begin at odd elements.
template <int kRows>
void CheckKeyPairs(std::int64_t pairs, std::int64_t gap) {
  constexpr int keys = static_cast<int>(hn::MaxLanes(hn::ScalableTag<float>()));
  const auto line = pairs + gap;
  const Matrix<float> numbers(kRows + keys, 2 * line, 4);
  std::vector<hwy::bfloat16_t> q(2 * pairs * kRows), k(2 * line * keys + 1);
  for (int r = 0; r < kRows; ++r)
    for (std::int64_t c = 0; c < 2 * pairs; ++c)
      q[r * 2 * pairs + c] = hwy::BF16FromF32(numbers.data[r * 2 * line + c]);
  for (std::int64_t i = 0; i < 2 * line * keys; ++i) k[i + 1] = hwy::BF16FromF32(numbers.data[kRows * 2 * line + i]);
  Matrix<float> s(kRows, kTile, 3);
  ProductsOfKeys<kRows, Fetch::nothing>(reinterpret_cast<const Pair*>(q.data()), pairs,
                                        reinterpret_cast<const float*>(k.data() + 1), line, s.data.get(), 0);
  for (int r = 0; r < kRows; ++r)
    for (int key = 0; key < keys; ++key)
      ExpectSum(s.data[r * kTile + key], 0, 2 * pairs, std::numeric_limits<float>::epsilon(), [&](std::int64_t c) {
        return double(hwy::F32FromBF16(q[r * 2 * pairs + c])) * double(hwy::F32FromBF16(k[1 + key * 2 * line + c]));
      });
}
#endif

template <class T>
void CheckTransposedKeys(std::int64_t depth, std::int64_t gap) {
  const Matrix<T> k(kTile, depth + gap, 5);
  Matrix<T> to(depth, kTile, 6);
  TransposeKeys(kTile, k.data.get(), depth + gap, depth, to.data.get());
  for (std::int64_t c = 0; c < depth; ++c)
    for (int key = 0; key < kTile; ++key) ASSERT_EQ(to.data[c * kTile + key], k.data[key * (depth + gap) + c]);
}

template <int kRows, int kVectors, class T, class Memory>
void CheckValues(std::int64_t gap) {
  constexpr int patch = kVectors * static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
  const auto line = patch + gap, width = std::int64_t{2} * patch;
  const Matrix<T> p(kRows, kTile, 7), numbers(kTile, line, 8), before(kRows, width, 9);
  Matrix<T> out(kRows, width, 9);
  std::vector<Memory> v(kTile * line);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = hwy::ConvertScalarTo<Memory>(numbers.data[i]);
  AddValuesPatch<kRows, kVectors>(kTile, p.data.get(), v.data(), line, out.data.get() + patch, width, 0);
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < width; ++c) {
      const T got = out.data[r * width + c], old = before.data[r * width + c];
      if (c < patch) {
        ASSERT_EQ(got, old);
        continue;
      }
      ExpectSum(got, old, kTile, std::numeric_limits<T>::epsilon(), [&](std::int64_t key) {
        return double(p.data[r * kTile + key]) * hwy::ConvertScalarTo<double>(v[key * line + c - patch]);
      });
    }
}

template <int kRows>
void CheckRowsAtOnce() {
  for (const std::int64_t gap : {0, 4, 12}) {
    for (const std::int64_t depth : {4, 16, 64, 100}) {
      CheckKeys<kRows, float>(depth, gap);
      CheckKeys<kRows, double>(depth, gap);
#if HWY_NATIVE_DOT_BF16
      CheckKeyPairs<kRows>(depth, gap);
#endif
    }
    CheckValues<kRows, 1, float, float>(gap);
    CheckValues<kRows, kFewVectors, float, float>(gap + 1);
    CheckValues<kRows, kFewVectors, float, hwy::bfloat16_t>(gap + 1);
    CheckValues<kRows, 1, float, hwy::float16_t>(gap + 1);
    CheckValues<kRows, kFewVectors, double, double>(gap);
  }
}

void FewProductsMatchLoops() {
  CheckRowsAtOnce<1>();
  CheckRowsAtOnce<2>();
  CheckRowsAtOnce<4>();
  for (const std::int64_t gap : {0, 3, 4}) {
    CheckTransposedKeys<float>(64, gap);
    CheckTransposedKeys<double>(12, gap);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anyflash::cpu {

HWY_EXPORT(FewProductsMatchLoops);

TEST(CpuFewProducts, MatchLoops) {
  on_every_set(HWY_TARGETS, [] { HWY_DYNAMIC_DISPATCH(FewProductsMatchLoops)(); });
}

}  // namespace anyflash::cpu
#endif
