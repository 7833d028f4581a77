// Statistics of rows on a GPU: each is written, the same bits, whichever of the others are asked for. (Python asks for
// all.)
#include <anyflash/attention.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "tensor.h"

namespace anyflash {
namespace {

using Case = std::tuple<ElementType, std::int64_t, std::int64_t>;  // queries, channels

class GpuStatistics : public testing::TestWithParam<Case> {};

TEST_P(GpuStatistics, EachAlone) {
  const auto [type, queries, depth] = GetParam();
  const auto statistic = type == ElementType::float64 ? type : ElementType::float32;
  const Tensor q(type, {1, 2, queries, depth}, 0x3f), k(type, {1, 2, 150, depth}, 0x3c);
  const Tensor v(type, {1, 2, 150, depth}, 0x3f), out(type, {1, 2, queries, depth}, 0);
  Options options;
  options.rule = causal();
  std::vector<std::vector<unsigned char>> expected;
  for (int asked = 7; asked > 0; --asked) {  // bits: lse, row_sum, row_max
    std::vector<Tensor> rows;
    for (int i = 0; i < 3; ++i) rows.emplace_back(statistic, std::initializer_list<std::int64_t>{1, 2, queries}, 0xa5);
    const auto given = [&](int i) { return asked >> i & 1 ? rows[i].view : TensorView(); };
    forward(q.view, k.view, v.view, {out.view, given(0), given(1), given(2)}, options);
    for (int i = 0; i < 3; ++i) {
      const auto found = rows[i].bytes();
      if (asked == 7) expected.push_back(found);
      EXPECT_EQ(found, asked >> i & 1 ? expected[i] : std::vector<unsigned char>(found.size(), 0xa5))
          << "number " << i << " of those asked for, " << asked;
    }
  }
}

/// Pairs to a number near the maximum weigh what those to the maximum weigh, also of rows whose scores are large: such
/// pairs are joined with a sink, or with those of kernels that write maxima.
TEST_P(GpuStatistics, NearMaxima) {
  const auto [type, queries, depth] = GetParam();
  const auto statistic = type == ElementType::float64 ? type : ElementType::float32;
  const auto q = Tensor::of_sines(type, {1, 2, queries, depth}, 0), k = Tensor::of_sines(type, {1, 2, 150, depth}, 1);
  const Tensor v(type, {1, 2, 150, depth}, 0x3f), out(type, {1, 2, queries, depth}, 0);
  for (const double scale : {0.125, 4096.0}) {  // products with them are exact
    Options options;
    options.rule = causal();
    options.scale = scale;
    std::vector<double> maxima[2], logarithms[2];
    for (const bool near : {false, true}) {
      const Tensor sum(statistic, {1, 2, queries}, 0xa5), largest(statistic, {1, 2, queries}, 0xa5);
      ForwardOutputs outputs{out.view, {}, sum.view, largest.view};
      outputs.near_maxima = near;
      forward(q.view, k.view, v.view, outputs, options);
      const auto l = sum.bytes(), m = largest.bytes();
      for (std::int64_t i = 0; i < 2 * queries; ++i) {
        maxima[near].push_back(number_at(statistic, m.data(), i));
        logarithms[near].push_back(std::log(number_at(statistic, l.data(), i)));
      }
    }
    for (std::size_t i = 0; i < maxima[0].size(); ++i)
      EXPECT_NEAR(maxima[1][i] - maxima[0][i], logarithms[0][i] - logarithms[1][i], 4e-6);
  }
}

/// Also where there is nothing to compute.
TEST(GpuStatistics, OneInHostMemoryIsToldBeforeAnythingIsWritten) {
  const auto type = ElementType::float32;
  const Tensor q(type, {1, 2, 100, 64}, 0), out(type, {1, 2, 100, 64}, 0xa5);
  const auto untouched = out.bytes();
  std::vector<float> rows(200, 7);
  for (const std::int64_t keys : {0, 150}) {
    const Tensor k(type, {1, 2, keys, 64}, 0);
    try {
      forward(q.view, k.view, k.view, {out.view, TensorView(rows.data(), type, {1, 2, 100}, gpu), {}, {}}, {});
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()), "lse: in host memory, expected memory of cuda:0");
    }
    EXPECT_EQ(out.bytes(), untouched);
    EXPECT_EQ(rows, std::vector<float>(200, 7));
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuStatistics,
                         testing::Combine(testing::Values(ElementType::float16, ElementType::bfloat16,
                                                          ElementType::float32, ElementType::float64),
                                          testing::Values(1, 100), testing::Values(64, 72, 128)));

}  // namespace
}  // namespace anyflash
