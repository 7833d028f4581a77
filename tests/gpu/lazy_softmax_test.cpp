// The online softmax of Hopper's 16-bit forward pass (src/cuda/tile/lazy_softmax.cuh) without a GPU: four threads are the
// lanes that share a row. Results are right, or not finite: then the portable kernel makes them.
#include "cuda/tile/lazy_softmax.cuh"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace anyflash::cuda {
namespace {

constexpr int kCols = 32;
constexpr float kInfinity = std::numeric_limits<float>::infinity(), kLowest = -0x1.fep127f;  // bfloat16's
using Row = std::vector<float>;                                                              // a number a key

struct Result {
  double out, lse, joinable_lse;  ///< the last: of row_max and row_sum, for calls whose results are joined
  bool left;                      ///< to the portable kernel, as Attention::store() says
};

Result softmax_of(const Row& scores, const Row& values, float scale, const float* sink, bool maxima) {
  const float scale_log2 = static_cast<float>(scale * 1.4426950408889634);
  Result result{};
  float outs[4];
  const auto work = [&](unsigned own_lane) {
    lane = own_lane;
    LazySoftmax softmax;
    AccumulatorTile<kCols> s;
    float out = 0, factor[2];
    softmax.reset();
    for (std::size_t first = 0; first < scores.size(); first += kCols) {
      const auto key = [&](int n) { return first + n / 2 * 8 + 2 * lane + n % 2; };
      for (int n = 0; n < s.kPerRow; ++n) s.at(0, n) = s.at(1, n) = scores[key(n)];
      softmax.exponentiate(s, scale_log2, maxima);
      if (first > 0 && softmax.raise_shift_by_sums(factor)) {
        out *= factor[0];
        for (int n = 0; n < s.kPerRow; ++n) s.at(0, n) *= factor[0];
      }
      for (int n = 0; n < s.kPerRow; ++n) out += s.at(0, n) * values[key(n)];
    }
    auto row = softmax.finished(maxima);
    auto statistics = row.statistics(scale_log2, scale, maxima);
    const bool large = row.shift != -kInfinity && !(std::fabs(row.shift) < (1 << 28));
    if (sink) row.add_sink(*sink), statistics.add_sink(*sink);
    outs[lane] = out * (row.sum == 0 ? 0 : row.factor / row.sum);
    if (lane == 0)
      result.lse = row.lse(), result.joinable_lse = statistics.m + std::log(double{statistics.l}), result.left = large;
  };
  std::vector<std::thread> lanes;
  for (unsigned i = 0; i < 4; ++i) lanes.emplace_back(work, i);
  for (auto& one : lanes) one.join();
  result.out = double{outs[0]} + outs[1] + outs[2] + outs[3];
  result.left |= !std::isfinite(result.out);
  return result;
}

/// Returns whether the row is left to the portable kernel.
bool check(const std::string& name, const Row& scores, const Row& values, float scale = 1,
           const float* sink = nullptr) {
  double largest = sink ? *sink : -kInfinity, sum = 0, out = 0, size = 0;
  for (const double score : scores) largest = std::fmax(largest, score * scale);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double p = largest == -kInfinity ? 0 : std::exp(double{scores[i]} * scale - largest);
    sum += p, out += p * values[i], size += p * std::fabs(values[i]);
  }
  if (sink && largest > -kInfinity) sum += std::exp(*sink - largest);
  const double lse = sum == 0 ? -kInfinity : largest + std::log(sum);
  if (sum > 0) out /= sum, size /= sum;
  bool left[2];
  for (const bool maxima : {false, true}) {
    const auto found = softmax_of(scores, values, scale, sink, maxima);
    left[maxima] = found.left;
    if (found.left) continue;
    EXPECT_NEAR(found.out, out, 1e-5 * size) << name;
    for (const double one : {found.lse, found.joinable_lse})
      EXPECT_TRUE(one == lse || std::fabs(one - lse) <= 1e-5 + 2e-7 * std::fabs(lse))
          << name << ": " << one << ", " << lse;
  }
  EXPECT_EQ(left[0], left[1]) << name;
  return left[0];
}

Row steps(const std::vector<float>& each) {
  Row row;
  for (const float x : each) row.insert(row.end(), kCols, x);
  return row;
}

TEST(LazySoftmax, ScoresThatTheirScaleOverflows) {
  const auto values = steps({1, 2, 3});
  EXPECT_TRUE(check("only the lowest", steps({kLowest, kLowest, kLowest}), values));
  EXPECT_FALSE(check("the lowest first", steps({kLowest, kLowest, 1}), values));
  EXPECT_FALSE(check("the lowest last", steps({1, kLowest, kLowest}), values));
  EXPECT_FALSE(check("-inf first", steps({-kInfinity, -kInfinity, 1}), values));
  EXPECT_FALSE(check("-inf alone", steps({-kInfinity, -kInfinity, -kInfinity}), values));
  EXPECT_TRUE(check("the largest", steps({-kLowest, -kLowest, 1}), values));
  EXPECT_TRUE(check("NaN", steps({NAN, 1, 1}), values));
}

TEST(LazySoftmax, RisesOfLargeScores) {
  for (const float score : {0.0f, 1.3e5f, 1024.0f * 1024, 4e6f, 1.2e8f})
    for (const float rise : {12.0f, 16.0f, 32.0f})
      EXPECT_FALSE(check("one rise", steps({score, score + rise, score + rise}), steps({0, 1, -1})));
  EXPECT_FALSE(check("many rises", steps({3e6f, 3e6f + 12, 3e6f + 24, 3e6f + 36}), steps({1, -1, 3, -2})));
}

TEST(LazySoftmax, RisesThatRoundToMore) {
  const auto values = steps({1, 1, 1, 1});
  int left = 0, all = 0;
  for (const float score : {8.388608e7f, 1.17e8f, 1.51e8f})
    for (float rise = 8; rise < 128; rise += 8, ++all) {
      auto scores = steps({score, score, score, score});
      scores[70] = score + rise;
      left += check("a rise of " + std::to_string(rise), scores, values);
    }
  EXPECT_LT(left, all / 2);
}

TEST(LazySoftmax, TheSmallestScale) {
  EXPECT_FALSE(check("a shift over its scale", steps({0, 0x1.e6p127f}), steps({1, 2}), 7e-38f));
}

TEST(LazySoftmax, SinksBesideLargeScores) {
  auto one_large = steps({-1e30f, -1e30f});
  for (const float scale : {1.0f, 0.125f}) {
    one_large[3] = 1e7f / scale;
    for (const float sink : {1e7f, 1e7f - 3, 2.0f, kLowest, -kInfinity})
      EXPECT_FALSE(check("beside 1e7", one_large, steps({1, 2}), scale, &sink));
  }
  for (const float sink : {5e9f, 1e12f, 1e30f, -kLowest, kInfinity, NAN})
    EXPECT_TRUE(check("a large sink", steps({0, 1}), steps({1, 2}), 1, &sink));
  for (const float sink : {-5e9f, -1e30f, kLowest, -kInfinity})
    EXPECT_FALSE(check("a low sink", steps({0, 1}), steps({1, 2}), 1, &sink));
  const auto nothing = steps({-kInfinity, -kInfinity});
  for (const float sink : {-1e10f, kLowest, 1e10f}) EXPECT_TRUE(check("alone", nothing, steps({1, 2}), 1, &sink));
  for (const float sink : {-1e7f, 0.0f, 1e7f, -kInfinity})
    EXPECT_FALSE(check("alone", nothing, steps({1, 2}), 1, &sink));
}

TEST(LazySoftmax, RandomRows) {
  std::mt19937 random(1);
  const auto draw = [&](double low, double high) { return std::uniform_real_distribution<double>(low, high)(random); };
  int left = 0;
  for (int turn = 0; turn < 300; ++turn) {
    const int count = 1 + turn % 5;
    Row scores(kCols * count), values(scores.size());
    const double scale = std::exp2(std::round(draw(-6, 3))), spread = std::exp2(draw(-3, 6)),
                 level = std::exp2(draw(-3, 25));
    const float hidden = turn % 3 ? -kInfinity : kLowest, sink = static_cast<float>(draw(-1, 1) * level);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const double step_level = level + spread * static_cast<double>(i / kCols);
      scores[i] = draw(0, 1) < 0.3 ? hidden : static_cast<float>((step_level + spread * draw(-1, 1)) / scale);
      values[i] = static_cast<float>(draw(-1, 1));
    }
    left +=
        check("turn " + std::to_string(turn), scores, values, static_cast<float>(scale), turn % 2 ? &sink : nullptr);
  }
  EXPECT_LT(left, 30);
}

}  // namespace
}  // namespace anyflash::cuda
