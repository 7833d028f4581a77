// The public join: two results over different keys become one.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <anyflash/anyflash.h>
#include <gtest/gtest.h>

namespace {

using anyflash::DeviceKind, anyflash::ElementType, anyflash::Error, anyflash::ForwardOutputs, anyflash::TensorView;

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t batch = 2, heads = 3, queries = 4, channels = 5, gap = 2;

/// float64, out in memory (batch, queries, heads, channels) with gaps between the channels.
struct Result {
  std::vector<double> out, sums, maxima;

  explicit Result(double first)
      : out(batch * heads * queries * channels * gap), sums(batch * heads * queries), maxima(sums.size()) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = std::sin(first + double(i));
    for (std::size_t i = 0; i < sums.size(); ++i) {
      sums[i] = 1 + std::fabs(std::cos(first + double(i))), maxima[i] = 3 * std::sin(first * double(i + 1));
    }
  }

  static std::size_t row(std::int64_t b, std::int64_t h, std::int64_t i) { return (b * heads + h) * queries + i; }
  double& at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t c) {
    return out[(((b * queries + i) * heads + h) * channels + c) * gap];
  }
  void set(std::size_t row, double sum, double largest) { sums[row] = sum, maxima[row] = largest; }

  ForwardOutputs views() {
    TensorView view(out.data(), ElementType::float64, {batch, heads, queries, channels});
    view.strides = {queries * heads * channels * gap, channels * gap, heads * channels * gap, gap};
    return {view,
            {},
            TensorView(sums.data(), ElementType::float64, {batch, heads, queries}),
            TensorView(maxima.data(), ElementType::float64, {batch, heads, queries})};
  }
};

TEST(Join, ValuesStridesAndRowsWithoutKeys) {
  Result into(1), part(2);
  for (std::int64_t c = 0; c < channels; ++c) into.at(0, 1, 2, c) = into.at(0, 1, 3, c) = 0;
  into.set(Result::row(0, 1, 2), 0, -infinity);
  into.set(Result::row(0, 1, 3), 0, -infinity), part.set(Result::row(0, 1, 3), 0, -infinity);
  part.set(Result::row(1, 2, 0), 0, -infinity);
  auto before = into;
  anyflash::join(into.views(), part.views(), nullptr, 2);
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t i = 0; i < queries; ++i) {
        const auto row = Result::row(b, h, i);
        const auto own = before.sums[row] * std::exp(before.maxima[row]);
        const auto more = part.sums[row] * std::exp(part.maxima[row]);
        EXPECT_EQ(into.maxima[row], std::fmax(before.maxima[row], part.maxima[row]));
        EXPECT_NEAR(own + more > 0 ? into.sums[row] * std::exp(into.maxima[row]) : into.sums[row], own + more, 1e-12);
        for (std::int64_t c = 0; c < channels; ++c) {
          const auto weighted = own * before.at(b, h, i, c) + more * part.at(b, h, i, c);
          EXPECT_NEAR(into.at(b, h, i, c), own + more > 0 ? weighted / (own + more) : 0, 1e-12);
        }
      }
  for (std::size_t i = 1; i < into.out.size(); i += gap) EXPECT_EQ(into.out[i], before.out[i]) << "between channels";
}

TEST(Join, KeepsNaN) {
  const auto nan = std::nan("");
  for (const bool in_part : {false, true})
    for (const auto largest : {-infinity, nan}) {
      Result into(1), part(2);
      (in_part ? part : into).set(0, nan, largest);
      anyflash::join(into.views(), part.views());
      EXPECT_TRUE(std::isnan(into.sums[0]));
      for (std::int64_t c = 0; c < channels; ++c) EXPECT_TRUE(std::isnan(into.at(0, 0, 0, c)));
      EXPECT_FALSE(std::isnan(into.sums[1]) || std::isnan(into.at(0, 0, 1, 0)));
    }
}

TEST(Join, AMeanOfTheLargestNumberIsFinite) {
  constexpr double most = std::numeric_limits<double>::max();
  for (double sum = 1; sum < 1 + 1e-14; sum = std::nextafter(sum, 2)) {
    Result into(1), part(2);
    into.set(0, 1, 0), part.set(0, sum, 0);
    for (std::int64_t c = 0; c < channels; ++c) into.at(0, 0, 0, c) = part.at(0, 0, 0, c) = c % 2 ? -most : most;
    anyflash::join(into.views(), part.views());
    for (std::int64_t c = 0; c < channels; ++c) EXPECT_NEAR(into.at(0, 0, 0, c) / most, c % 2 ? -1 : 1, 1e-15) << sum;
  }
}

TEST(Join, OfTheTileMachine) {
  Result into(1), part(2), expected(1);
  anyflash::join(expected.views(), part.views());
  auto views = into.views(), others = part.views();
  for (auto* one : {&views.out, &views.row_sum, &views.row_max, &others.out, &others.row_sum, &others.row_max})
    one->device.kind = DeviceKind::tiles;
  anyflash::join(views, others);
  EXPECT_EQ(into.out, expected.out);
}

TEST(Join, WrongInput) {
  struct Case {
    const char* line;
    void (*spoil)(ForwardOutputs& into, ForwardOutputs& part);
  };
  const Case cases[] = {
      {"out: not given", [](auto& into, auto&) { into.out = {}; }},
      {"row_sum: not given", [](auto&, auto& part) { part.row_sum = {}; }},
      {"out: type float32, expected float64 as in part",
       [](auto& into, auto&) { into.out.type = ElementType::float32; }},
      {"out: shape (2, 3, 4, 4), expected (2, 3, 4, 5)", [](auto& into, auto&) { into.out.shape[3] = 4; }},
      {"row_sum: shape (2, 3, 3), expected (2, 3, 4)", [](auto& into, auto&) { into.row_sum.shape[2] = 3; }},
      {"row_max: type float32, expected float64", [](auto&, auto& part) { part.row_max.type = ElementType::float32; }},
      {"into: other axes of out, expected those of part", [](auto& into, auto&) { into.out.rank = 5; }},
  };
  for (const auto& wrong : cases) {
    Result into(1), part(2);
    const auto before = into.out;
    auto views = into.views(), others = part.views();
    wrong.spoil(views, others);
    try {
      anyflash::join(views, others);
      ADD_FAILURE() << "nothing was thrown: " << wrong.line;
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), wrong.line);
    }
    EXPECT_EQ(into.out, before);
  }
}

}  // namespace
