// Joins two results over different keys. What bounds it is memory.
#include <cmath>
#include <limits>

#include "cpu/backend.h"
#include "cpu/numbers.h"
#include "problem/join.h"

namespace anyflash::cpu {
namespace {

/// One row: `to` becomes the weighted mean of both. Of finite numbers it is finite, however the weights are rounded.
template <class Into, class Part, class T>
void join_row(Into* to, std::int64_t step, const Part* from, std::int64_t from_step, std::int64_t channels, T of_to,
              T of_from) {
  for (std::int64_t c = 0; c < channels; ++c) {
    const T own = hwy::ConvertScalarTo<T>(to[c * step]), more = hwy::ConvertScalarTo<T>(from[c * from_step]);
    T mean = own * of_to + more * of_from;
    if (std::isinf(mean) && std::isfinite(own) && std::isfinite(more))
      mean = std::copysign(std::numeric_limits<T>::max(), mean);
    to[c * step] = Narrow<Into>(mean);
  }
}

template <class Into, class Part, class T>
void join_all(const JoinProblem& problem) {
  const auto &into = problem.into, &part = problem.part;
  const auto number = [](const RowStatistic& rows, std::int64_t b, std::int64_t h, std::int64_t query) -> T& {
    return reinterpret_cast<T*>(rows.data)[b * rows.batch + h * rows.head + query * rows.query];
  };
  const auto at = [](const Operand& out, std::int64_t b, std::int64_t h, std::int64_t z, std::int64_t y,
                     std::int64_t x) {
    return b * out.batch + h * out.head + z * out.sequence[0] + y * out.sequence[1] + x * out.sequence[2];
  };
  const auto queries = problem.queries, rows = problem.batch * queries;
#pragma omp parallel for num_threads(problem.threads) if (problem.threads > 1 && rows > 1)
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto b = i / queries, query = i % queries, x = query % problem.size[2];
    const auto y = query / problem.size[2] % problem.size[1], z = query / problem.size[2] / problem.size[1];
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      T &sum = number(into.row_sum, b, h, query), &largest = number(into.row_max, b, h, query);
      const T more = number(part.row_sum, b, h, query), other = number(part.row_max, b, h, query);
      // A sum of 0 has seen no key. NaN has, whatever the maximum beside it.
      if (more == 0) continue;
      const T both = largest > other || other != other ? largest : other;
      const T own_share = sum == 0 ? T(0) : std::exp(largest - both) * sum;
      const T share = std::exp(other - both) * more;
      sum = own_share + share;
      largest = sum != sum && both != std::numeric_limits<T>::infinity() ? sum : both;  // NaN as in forward
      join_row(reinterpret_cast<Into*>(into.out.data) + at(into.out, b, h, z, y, x), into.out.channel,
               reinterpret_cast<const Part*>(part.out.data) + at(part.out, b, h, z, y, x), part.out.channel,
               problem.channels, own_share / sum, share / sum);
    }
  }
}

}  // namespace

void join(const JoinProblem& problem) {
  const bool widened = problem.into.type != problem.part.type;
  switch (problem.part.type) {
    case ElementType::float16:
      return widened ? join_all<float, hwy::float16_t, float>(problem)
                     : join_all<hwy::float16_t, hwy::float16_t, float>(problem);
    case ElementType::bfloat16:
      return widened ? join_all<float, hwy::bfloat16_t, float>(problem)
                     : join_all<hwy::bfloat16_t, hwy::bfloat16_t, float>(problem);
    case ElementType::float32: return join_all<float, float, float>(problem);
    default: return join_all<double, double, double>(problem);
  }
}

}  // namespace anyflash::cpu
