// The kernels' shared pieces on every instruction set: products against plain loops, exp and tanh against long double,
// rows against the memory they were read from and written to.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "pieces_test.cpp"
#include "hwy/foreach_target.h"

#include "pieces_support.h"

#include "cpu/numbers.h"
#include "cpu/workspace.h"

#include "hwy/highway.h"

#include "cpu/exp-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/pairs-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/tanh-inl.h"

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

/// C = or += A B for one shape; A as it is or transposed in memory.
template <class T, bool kAdd>
void CheckGemm(std::int64_t rows, std::int64_t k, std::int64_t n, bool transposed) {
  const Matrix<T> a(rows, k, 1), b(k, n, 2), before(rows, n, 3);
  Matrix<T> c(rows, n, 3);
  const std::int64_t a_row = transposed ? 1 : k, a_k = transposed ? rows : 1;
  Gemm<kAdd>(rows, k, n, a.data.get(), a_row, a_k, b.data.get(), n, c.data.get(), n);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = kAdd ? double(before.data[i * n + j]) : 0, size = 1;
      for (std::int64_t e = 0; e < k; ++e) {
        const double product = double(a.data[i * a_row + e * a_k]) * double(b.data[e * n + j]);
        sum += product, size += std::fabs(product);
      }
      ASSERT_NEAR(double(c.data[i * n + j]), sum, size * std::numeric_limits<T>::epsilon() * 8)
          << rows << " x " << k << " x " << n << " at " << i << ", " << j;
    }
}

#if ANYFLASH_PAIRS
/// What lies below the stack's end is NaN then, for those who forget to write there.
HWY_NOINLINE void SpoilStack() {
  volatile std::uint32_t words[8192];
  for (auto& word : words) word = ~0u;
}

/// Pairs: what is multiplied is rounded to bfloat16, left operands in rows or, as rows of Pairs, in columns.
template <bool kAdd>
void CheckPairs(std::int64_t rows, std::int64_t k, std::int64_t n, bool transposed) {
  if (ANYFLASH_PAIRS_IN_TILES && (transposed || !amx::available())) return;  // neither exists
  const Matrix<float> a(rows, k, 1), b(kTile, n, 2), before(rows, n, 3);
  Matrix<float> c(rows, n, 3);
  const auto number = [](float x) { return double(hwy::F32FromBF16(hwy::BF16FromF32(x))); };
  const auto pair = [](float low, float high) {
    return Pair{hwy::BitCastScalar<std::uint16_t>(hwy::BF16FromF32(low)) |
                std::uint32_t{hwy::BitCastScalar<std::uint16_t>(hwy::BF16FromF32(high))} << 16};
  };
  std::vector<Pair> left(static_cast<std::size_t>(rows * k / 2));
  const std::int64_t a_row = transposed ? 1 : k / 2, a_k = transposed ? rows : 1;
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t e = 0; e < k; e += 2)
      left[i * a_row + e / 2 * a_k] = pair(a.data[i * k + e], a.data[i * k + e + 1]);
  const auto right = allocate<Pair>(kTile / 2 * n);
  PairRows(b.data.get(), n, right.get());
  SpoilStack();
  Gemm<kAdd>(rows, k / 2, n, left.data(), a_row, a_k, right.get(), n, c.data.get(), n);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = kAdd ? double(before.data[i * n + j]) : 0, size = 1;
      for (std::int64_t e = 0; e < k; ++e) {
        const double product = number(a.data[i * k + e]) * number(b.data[e * n + j]);
        sum += product, size += std::fabs(product);
      }
      ASSERT_NEAR(double(c.data[i * n + j]), sum, size * std::numeric_limits<float>::epsilon() * 8)
          << rows << " x " << k << " x " << n << " at " << i << ", " << j;
    }
}
#endif

void GemmMatchesLoops() {
#if ANYFLASH_PAIRS
  for (const std::int64_t rows : {1, 2, 5, 7, 8, 13, 64, 67})
    for (const std::int64_t k : {0, 2, 4, 16, 48, 64})
      for (const std::int64_t n : {16, 48, 64, 80})
        for (const bool transposed : {false, true}) {
          CheckPairs<false>(rows, k, n, transposed);
          CheckPairs<true>(rows, k, n, transposed);
        }
#endif

  for (const std::int64_t rows : {1, 2, 5, 7, 8, 13, 64, 67})
    for (const std::int64_t k : {0, 1, 2, 3, 17, 64})
      for (const std::int64_t n : {16, 48, 64, 80})
        for (const bool transposed : {false, true}) {
          CheckGemm<float, false>(rows, k, n, transposed);
          CheckGemm<float, true>(rows, k, n, transposed);
          CheckGemm<double, false>(rows, k, n, transposed);
          CheckGemm<double, true>(rows, k, n, transposed);
        }
}

/// |got - exact| in units in the last place of the exact result rounded to T.
template <class T>
double UlpError(T got, long double exact) {
  int exponent;
  std::frexp(exact, &exponent);
  exponent = std::max(exponent, std::numeric_limits<T>::min_exponent);
  const auto unit = std::ldexp(1.0L, exponent - std::numeric_limits<T>::digits);
  return static_cast<double>(std::fabs(static_cast<long double>(got) - exact) / unit);
}

template <class T>
std::vector<T> ExpArguments() {
  constexpr T lowest = sizeof(T) == 4 ? T(-87.3) : T(-708.3);
  std::vector<T> x;
  std::mt19937_64 random(5);
  for (const T low : {lowest, T(-20), T(-1), T(-1e-3)}) {
    std::uniform_real_distribution<T> uniform(low, T(0));
    for (int i = 0; i < 200000; ++i) x.push_back(uniform(random));
  }
  std::uniform_real_distribution<T> above(0, T(10));  // a backward pass's S - lse may lie above 0 by a rounding
  for (int i = 0; i < 50000; ++i) x.push_back(above(random));
  // The worst floats: with FMA, without, of a table.
  for (const float at : {0x1.4cec68p+2f, -0x1.4c91d2p+2f, -0x1.ac9f0cp+4f}) x.push_back(at);
  // Where the number of sixteenths of powers of two steps, and its neighbours.
  for (int n = 0; n > 16 * (sizeof(T) == 4 ? -125 : -1020); --n) {
    const T step = static_cast<T>((n + 0.5L) / 16 * 0.693147180559945309417232121458L);
    for (const T at : {step, std::nextafter(step, T(1)), std::nextafter(step, T(-1e4))}) x.push_back(at);
  }
  return x;
}

template <class T>
double WorstExpError() {
  const hn::ScalableTag<T> d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  auto x = ExpArguments<T>();
  x.resize((x.size() + lanes - 1) / lanes * lanes);
  std::vector<T> result(x.size());
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); i += lanes) hn::StoreU(SoftmaxExp(d, hn::LoadU(d, &x[i])), d, &result[i]);
  for (std::size_t i = 0; i < x.size(); ++i)
    worst = std::fmax(worst, UlpError(result[i], std::exp(static_cast<long double>(x[i]))));
  return worst;
}

template <class T>
T ExpOf(T x) {
  const hn::ScalableTag<T> d;
  return hn::GetLane(SoftmaxExp(d, hn::Set(d, x)));
}

template <class T>
void CheckExpEdges() {
  constexpr T infinity = std::numeric_limits<T>::infinity();
  EXPECT_EQ(ExpOf(T(0)), T(1));
  EXPECT_EQ(ExpOf(-T(0)), T(1));
  EXPECT_EQ(ExpOf(-infinity), T(0));
  EXPECT_EQ(ExpOf(std::numeric_limits<T>::lowest()), T(0));
  EXPECT_EQ(ExpOf(T(-1e4)), T(0));
  EXPECT_TRUE(std::isnan(ExpOf(std::numeric_limits<T>::quiet_NaN())));
  EXPECT_TRUE(std::isnan(ExpOf(-std::numeric_limits<T>::quiet_NaN())));
}

void ExpIsAccurate() {
  const double in_float = WorstExpError<float>(), in_double = WorstExpError<double>();
  std::printf("  exp: %.3f ulp in float, %.3f in double\n", in_float, in_double);
  constexpr double stated = kExpByTable ? 0.76 : HWY_NATIVE_FMA ? 0.90 : 0.99;  // in exp-inl.h
  EXPECT_LE(in_float, stated);
  EXPECT_LE(in_double, stated);
  CheckExpEdges<float>();
  CheckExpEdges<double>();
}

template <class T>
double WorstTanhError() {
  const hn::ScalableTag<T> d;
  double worst = 0;
  std::mt19937_64 random(6);
  for (const T most : {T(1e-3), T(0.3), T(0.63), T(1.2), T(12), T(60)}) {
    std::uniform_real_distribution<T> uniform(-most, most);
    for (int i = 0; i < 50000; ++i) {
      const T x = uniform(random);
      const T got = hn::GetLane(CapTanh(d, hn::Set(d, x)));
      worst = std::fmax(worst, UlpError(got, std::tanh(static_cast<long double>(x))));
    }
  }
  return worst;
}

template <class T>
void CheckTanhEdges() {
  const hn::ScalableTag<T> d;
  const auto tanh = [&](T x) HWY_ATTR { return hn::GetLane(CapTanh(d, hn::Set(d, x))); };
  constexpr T infinity = std::numeric_limits<T>::infinity();
  EXPECT_EQ(tanh(T(0)), T(0));
  EXPECT_TRUE(std::signbit(tanh(T(-0.0))));
  EXPECT_EQ(tanh(std::numeric_limits<T>::denorm_min()), std::numeric_limits<T>::denorm_min());
  EXPECT_EQ(tanh(infinity), T(1));
  EXPECT_EQ(tanh(-infinity), T(-1));
  EXPECT_EQ(tanh(std::numeric_limits<T>::lowest()), T(-1));
  EXPECT_TRUE(std::isnan(tanh(std::numeric_limits<T>::quiet_NaN())));
}

void TanhIsAccurate() {
  const double in_float = WorstTanhError<float>(), in_double = WorstTanhError<double>();
  std::printf("  tanh: %.3f ulp in float, %.3f in double\n", in_float, in_double);
  EXPECT_LE(in_float, 2.0);
  EXPECT_LE(in_double, 2.0);
  CheckTanhEdges<float>();
  CheckTanhEdges<double>();
}

/// Strides of (b 2, h 3, z, y, x, channels) in some order of axes, innermost first; `gap` elements behind each line.
Operand Strided(const std::vector<char>& order, Int3 size, std::int64_t channels, std::int64_t gap,
                std::int64_t& total) {
  Operand operand;
  std::int64_t step = 1;
  for (const char axis : order) {
    switch (axis) {
      case 'c': operand.channel = step, step *= channels; break;
      case 'x': operand.sequence[2] = step, step *= size[2]; break;
      case 'y': operand.sequence[1] = step, step *= size[1]; break;
      case 'z': operand.sequence[0] = step, step *= size[0]; break;
      case 'h': operand.head = step, step *= 3; break;
      default: operand.batch = step, step *= 2;
    }
    if (axis == order[0]) step += gap;
  }
  total = step;
  return operand;
}

/// Rows of a box come as they lie in memory, and go back: everything else in memory stays as it was.
template <class T, class Memory>
void CheckRows(ElementType type, const std::vector<char>& order, std::int64_t channels, std::int64_t gap,
               const Box& box, Int3 size) {
  std::int64_t total;
  Operand operand = Strided(order, size, channels, gap, total);
  std::vector<Memory> memory(total), empty(total);
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (auto& x : memory) x = hwy::ConvertScalarTo<Memory>(normal(random));
  operand.data = reinterpret_cast<char*>(memory.data());
  const auto rows = rules::volume(box.extent), width = padded(channels);
  const auto loaded = allocate<T>(rows * width);
  std::fill_n(loaded.get(), rows * width, T(99));
  LoadRows(operand, type, 1, 2, box, size, channels, loaded.get(), width);
  std::vector<Memory> expected(total);
  for (std::int64_t r = 0; r < rows; ++r) {
    const Int3 c = box.entry(static_cast<std::int32_t>(r));
    const bool inside = rules::inside(c, size);
    for (std::int64_t i = 0; i < width; ++i) {
      auto at = 1 * operand.batch + 2 * operand.head + i * operand.channel;
      for (int d = 0; d < 3; ++d) at += c[d] * operand.sequence[d];
      const double wanted = inside && i < channels ? ReadNumber(operand.data, type, at) : 0;
      ASSERT_EQ(double(loaded[r * width + i]), wanted) << "row " << r << " channel " << i;
      if (inside && i < channels) expected[at] = memory[at];
    }
  }
  operand.data = reinterpret_cast<char*>(empty.data());
  StoreRows(loaded.get(), width, operand, type, 1, 2, box, size, channels);
  EXPECT_EQ(std::memcmp(empty.data(), expected.data(), total * sizeof(Memory)), 0);
}

void RowsComeAndGo() {
  const Box line{{{0, 0, 32}}, {{1, 1, 64}}, {{1, 1, 1}}}, stepped{{{0, 0, 3}}, {{1, 1, 64}}, {{1, 1, 2}}};
  const Box square{{{0, 1, 3}}, {{1, 8, 8}}, {{1, 1, 1}}}, cube{{{1, 0, 2}}, {{4, 4, 4}}, {{1, 2, 1}}};
  const std::vector<std::vector<char>> orders = {{'c', 'x', 'y', 'z', 'h', 'b'},
                                                 {'c', 'h', 'x', 'y', 'z', 'b'},
                                                 {'x', 'y', 'z', 'c', 'h', 'b'},
                                                 {'h', 'x', 'c', 'y', 'z', 'b'}};
  for (const auto& order : orders)
    for (const std::int64_t channels : {1, 3, 4, 17, 40})
      for (const std::int64_t gap : {0, 3}) {
        const auto check = [&](const Box& box, Int3 size) {
          CheckRows<float, float>(ElementType::float32, order, channels, gap, box, size);
          CheckRows<float, hwy::bfloat16_t>(ElementType::bfloat16, order, channels, gap, box, size);
          CheckRows<float, hwy::float16_t>(ElementType::float16, order, channels, gap, box, size);
          CheckRows<double, double>(ElementType::float64, order, channels, gap, box, size);
        };
        check(line, {{1, 1, 83}});
        check(stepped, {{1, 1, 80}});
        check(square, {{1, 7, 14}});
        check(cube, {{3, 6, 5}});
      }
}

/// EvenRows are the rows of RowAddresses where those are one step apart, and nothing elsewhere.
void EvenRowsAreRows() {
  Operand operand;
  operand.batch = 10000, operand.head = 1000, operand.channel = 1;
  operand.sequence[0] = 500, operand.sequence[1] = 70, operand.sequence[2] = 9;
  const std::int32_t table[] = {5, 3, 1, 2};
  const Pages none{}, pages{.table = table, .table_batch = 2, .table_page = 1, .page_size = 64, .pages = 9};
  const auto check = [&](const Box& box, Int3 size, const Pages& in, bool even) {
    const EvenRows rows(operand, 1, 2, box, box.extent[2], size, in);
    ASSERT_EQ(rows.line != 0, even);
    const RowAddresses address(operand, 1, 2, box, size);
    for (std::int32_t row = 0; even && row < address.count(); ++row)
      ASSERT_EQ(rows.first + row * rows.line, address[row]);
  };
  const Box line{{{0, 0, 32}}, {{1, 1, 64}}, {{1, 1, 1}}}, stepped{{{0, 0, 3}}, {{1, 1, 64}}, {{1, 1, 2}}};
  check(line, {{1, 1, 96}}, none, true);
  check(line, {{1, 1, 95}}, none, false);  // the last row is padding
  check(stepped, {{1, 1, 130}}, none, true);
  check(stepped, {{1, 1, 129}}, none, false);
  check(line, {{1, 1, 128}}, pages, false);
  check({{{0, 0, 0}}, {{1, 8, 8}}, {{1, 1, 1}}}, {{1, 8, 8}}, none, false);
}

/// Every 16-bit number survives a load and a store; NaN stays NaN.
template <class Memory>
void CheckAllNumbers(ElementType type) {
  std::vector<std::uint16_t> bits(1 << 16), back(1 << 16);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
  Operand operand;
  operand.channel = 1, operand.sequence[2] = 64;
  const Int3 size{{1, 1, 1024}};
  const auto rows = allocate<float>(kTile * 64);
  for (std::int32_t first = 0; first < 1024; first += kTile) {
    const Box box{{{0, 0, first}}, {{1, 1, kTile}}, {{1, 1, 1}}};
    operand.data = reinterpret_cast<char*>(bits.data());
    LoadRows(operand, type, 0, 0, box, size, 64, rows.get(), 64);
    operand.data = reinterpret_cast<char*>(back.data());
    StoreRows(rows.get(), 64, operand, type, 0, 0, box, size, 64);
  }
  for (std::size_t i = 0; i < bits.size(); ++i) {
    const double before = ReadNumber(reinterpret_cast<char*>(bits.data()), type, i);
    if (std::isnan(before)) {
      EXPECT_TRUE(std::isnan(ReadNumber(reinterpret_cast<char*>(back.data()), type, i))) << i;
    } else {
      EXPECT_EQ(back[i], bits[i]);
    }
  }
}

/// Rounding to nearest, ties to even: between any two neighbouring 16-bit numbers the middle goes to the even one, and
/// the floats beside the middle to their own side.
template <class Memory>
void CheckRounding(ElementType type) {
  const auto value = [](std::uint16_t bits) { return hwy::ConvertScalarTo<float>(std::bit_cast<Memory>(bits)); };
  std::vector<float> x;
  std::vector<std::uint16_t> wanted;
  const std::uint16_t infinity_bits = type == ElementType::float16 ? 0x7c00 : 0x7f80;
  for (std::uint16_t bits = 0; bits + 1 < infinity_bits; bits += 3) {
    const std::uint16_t next = bits + 1;
    const float middle = static_cast<float>((double(value(bits)) + double(value(next))) / 2);
    constexpr float infinity = std::numeric_limits<float>::infinity();
    x.insert(x.end(), {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, infinity)});
    wanted.insert(wanted.end(), {bits, static_cast<std::uint16_t>(bits % 2 ? next : bits), next});
  }
  std::vector<std::uint16_t> got(x.size());
  Operand operand;
  operand.channel = 1, operand.sequence[2] = 1, operand.data = reinterpret_cast<char*>(got.data());
  const auto width = padded(static_cast<std::int64_t>(x.size()));
  const auto row = allocate<float>(width);
  std::copy(x.begin(), x.end(), row.get());
  const Box box{{{0, 0, 0}}, {{1, 1, 1}}, {{1, 1, 1}}};
  StoreRows(row.get(), width, operand, type, 0, 0, box, {{1, 1, 1}}, static_cast<std::int64_t>(x.size()));
  for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(got[i], wanted[i]) << x[i];
}

void NumbersAreRoundedToNearest() {
  CheckAllNumbers<hwy::bfloat16_t>(ElementType::bfloat16);
  CheckAllNumbers<hwy::float16_t>(ElementType::float16);
  CheckRounding<hwy::bfloat16_t>(ElementType::bfloat16);
  CheckRounding<hwy::float16_t>(ElementType::float16);
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anyflash::cpu {

HWY_EXPORT(GemmMatchesLoops);
HWY_EXPORT(ExpIsAccurate);
HWY_EXPORT(TanhIsAccurate);
HWY_EXPORT(RowsComeAndGo);
HWY_EXPORT(EvenRowsAreRows);
HWY_EXPORT(NumbersAreRoundedToNearest);

TEST(CpuPieces, GemmMatchesLoops) {
  on_every_set(HWY_TARGETS, [] { HWY_DYNAMIC_DISPATCH(GemmMatchesLoops)(); });
}
TEST(CpuPieces, ExpIsAccurate) {
  on_every_set(HWY_TARGETS, [] { HWY_DYNAMIC_DISPATCH(ExpIsAccurate)(); });
}
TEST(CpuPieces, TanhIsAccurate) {
  on_every_set(HWY_TARGETS, [] { HWY_DYNAMIC_DISPATCH(TanhIsAccurate)(); });
}
TEST(CpuPieces, RowsComeAndGo) {
  on_every_set(HWY_TARGETS, [] { HWY_DYNAMIC_DISPATCH(RowsComeAndGo)(); });
}
TEST(CpuPieces, EvenRowsAreRows) {
  on_every_set(HWY_TARGETS, [] { HWY_DYNAMIC_DISPATCH(EvenRowsAreRows)(); });
}
TEST(CpuPieces, NumbersAreRoundedToNearest) {
  on_every_set(HWY_TARGETS, [] { HWY_DYNAMIC_DISPATCH(NumbersAreRoundedToNearest)(); });
}

}  // namespace anyflash::cpu
#endif
