// The pattern, shrunk: how much of each pixel's pairs is visible. Exact if that takes few words. Otherwise it is
// counted on evenly spread queries (all keys), so that a thin band in a long sequence is still found.
#include <algorithm>
#include <bit>
#include <cmath>

#include "plan/explained.h"
#include "plan/facts.h"
#include "rules/classes.h"
#include "rules/words.h"

namespace anyflash {
namespace {

constexpr double most_words = 1 << 24;  // bounds the time

/// Visible keys of one query among those from `first` to `last` - 1 in memory order.
class KeyCounter {
 public:
  KeyCounter(const rules::Program& program, Int3 k_size) : program_(program), k_size_(k_size) {}

  std::int64_t count(Int3 query, std::int64_t first, std::int64_t last) const {
    const Box alone{query, {{1, 1, 1}}, {{1, 1, 1}}};
    const auto kind = rules::tile_class(program_, alone, around(first, last));
    if (kind != TileClass::partial) return kind == TileClass::full ? last - first : 0;
    std::int64_t visible = 0;
    while (first < last) {
      const auto origin = rules::coordinate_of(first, k_size_);
      const auto entries = std::min<std::int64_t>({64, k_size_[2] - origin[2], last - first});
      const auto word = rules::word(program_, query, {origin, {{1, 1, 64}}, {{1, 1, 1}}});
      visible += std::popcount(word << (64 - entries));
      first += entries;
    }
    return visible;
  }

 private:
  /// The smallest box around the keys.
  Box around(std::int64_t first, std::int64_t last) const {
    auto from = rules::coordinate_of(first, k_size_), to = rules::coordinate_of(last - 1, k_size_);
    bool several = false;
    for (int i = 0; i < 3; ++i) {
      if (several) from[i] = 0, to[i] = k_size_[i] - 1;
      several |= from[i] != to[i];
    }
    return {from, {{to[0] - from[0] + 1, to[1] - from[1] + 1, to[2] - from[2] + 1}}, {{1, 1, 1}}};
  }

  const rules::Program& program_;
  Int3 k_size_;
};

/// Grey levels of the visible shares: the densest is 255, and none above 0 becomes 0.
void set_grey(Picture& picture, const std::vector<double>& shares) {
  const auto densest = *std::max_element(shares.begin(), shares.end());
  if (densest == 0) return;
  picture.densest = densest;
  for (std::size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] == 0 || shares[i] == densest) {
      picture.grey[i] = shares[i] == 0 ? 0 : 255;
    } else {
      picture.grey[i] = std::uint8_t(std::clamp(std::lround(255 * shares[i] / densest), 1L, 254L));
    }
  }
}

}  // namespace

Picture picture(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape, Align align,
                std::int64_t side) {
  ExplainOptions options;
  options.align = align;
  const auto problem = planning::explained_problem(rule, q_shape, k_shape, options);
  if (side < 1 || side > 4096) {
    throw Error(Error::Kind::value, "side: " + std::to_string(side) + ", expected 1 to 4096");
  }
  Picture result;
  result.queries = problem.queries();
  result.keys = problem.keys();
  result.width = int(std::min<std::int64_t>(side, result.keys));
  result.height = int(std::min<std::int64_t>(side, result.queries));
  result.grey.resize(std::size_t(result.width) * result.height);
  if (result.grey.empty()) return result;

  const auto [program, tables] = planning::first_program(problem);
  const KeyCounter counter(program, problem.k_size);
  const auto row_words = double(result.width) + double(result.keys) / double(std::min(problem.k_size[2], 64));
  const auto most_rows = std::max<std::int64_t>(1, std::int64_t(most_words / (row_words * result.height)));
  std::vector<double> shares(result.grey.size());
#pragma omp parallel for schedule(dynamic)
  for (int y = 0; y < result.height; ++y) {
    const auto top = y * result.queries / result.height, bottom = (y + 1) * result.queries / result.height;
    const auto rows = std::min(bottom - top, most_rows);
    for (int x = 0; x < result.width; ++x) {
      const auto left = x * result.keys / result.width, right = (x + 1) * result.keys / result.width;
      std::int64_t visible = 0;
      for (std::int64_t row = 0; row < rows; ++row) {
        // Spread by the golden ratio inside equal strips, to avoid beats with a rule's stride.
        const double inside = rows == bottom - top ? 0 : std::fmod(double(row + y) * 0.6180339887, 1.0);
        const auto query = top + std::int64_t((double(row) + inside) * double(bottom - top) / double(rows));
        visible += counter.count(rules::coordinate_of(query, problem.q_size), left, right);
      }
      shares[std::size_t(y) * result.width + x] = double(visible) / double(rows * (right - left));
    }
  }
  set_grey(result, shares);
  return result;
}

}  // namespace anyflash
