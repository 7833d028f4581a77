// Attention of an installed anyflash next to three loops.
#include <anyflash/anyflash.h>

#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr int heads = 2, queries = 37, keys = 41, channels = 16, window = 9;

std::vector<float> waves(int count, double frequency) {
  std::vector<float> numbers(count);
  for (int i = 0; i < count; ++i) numbers[i] = static_cast<float>(std::sin(frequency * (i + 1)));
  return numbers;
}

/// Causal attention within a window, by the formula.
std::vector<double> three_loops(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v) {
  std::vector<double> out(q.size());
  for (int row = 0; row < heads * queries; ++row) {
    const int head = row / queries, i = row % queries;
    double sum = 0, weighted[channels] = {};
    for (int j = 0; j < keys; ++j) {
      if (j > i || i - j >= window) continue;
      double score = 0;
      for (int c = 0; c < channels; ++c) score += double(q[row * channels + c]) * k[(head * keys + j) * channels + c];
      const double weight = std::exp(score / std::sqrt(double(channels)));
      sum += weight;
      for (int c = 0; c < channels; ++c) weighted[c] += weight * v[(head * keys + j) * channels + c];
    }
    for (int c = 0; c < channels; ++c) out[row * channels + c] = weighted[c] / sum;
  }
  return out;
}

}  // namespace

int main() {
  using anyflash::ElementType;
  auto q = waves(heads * queries * channels, 0.7), k = waves(heads * keys * channels, 1.3);
  auto v = waves(heads * keys * channels, 2.1);
  std::vector<float> out(q.size());

  anyflash::Options options;
  options.rule = anyflash::causal() & anyflash::local(window);
  anyflash::ForwardOutputs outputs;
  outputs.out = {out.data(), ElementType::float32, {1, heads, queries, channels}};
  anyflash::forward({q.data(), ElementType::float32, {1, heads, queries, channels}},
                    {k.data(), ElementType::float32, {1, heads, keys, channels}},
                    {v.data(), ElementType::float32, {1, heads, keys, channels}}, outputs, options);

  const auto expected = three_loops(q, k, v);
  double largest = 0;
  for (std::size_t i = 0; i < out.size(); ++i) largest = std::fmax(largest, std::fabs(out[i] - expected[i]));
  std::printf("anyflash %s, %s: largest error %g\n", ANYFLASH_VERSION, options.rule.text().c_str(), largest);
  return largest < 1e-5 ? 0 : 1;
}
