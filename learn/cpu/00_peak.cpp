// Rung 0: the limit. Multiply-adds on registers alone, as many as the processor can start.
//
// A vector multiply-add takes about four cycles, and two can start in each, so at least eight must be under way that do
// not wait for each other; here twelve are. No kernel that multiplies float32 numbers is faster than this loop. It is
// written as a product, C = A B with as many multiply-adds as that, so that it is timed as the others are: C is not made.
// Measured (AMD EPYC, 2 threads, Zen 5): 270 GFLOP/s.
#include <hwy/highway.h>

#include <cstdint>

#include "../rung.h"

extern "C" void rung(const Matmul* p) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<float> tag;
  constexpr int kChains = 12;
  hn::Vec<decltype(tag)> sums[kChains];
  for (auto& sum : sums) sum = hn::Zero(tag);
  const auto x = hn::Set(tag, p->a[0]), y = hn::Set(tag, p->b[0]);
  const auto steps = std::int64_t(p->rows) * p->columns * p->depth / (kChains * std::int64_t(hn::Lanes(tag)));
  for (std::int64_t i = 0; i < steps; ++i)
    for (auto& sum : sums) sum = hn::MulAdd(x, sum, y);
  for (auto& sum : sums) p->c[0] += hn::GetLane(sum);
}
