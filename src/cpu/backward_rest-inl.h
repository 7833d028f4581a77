// The remainder of a rounded lse. The rounding error of lse is an error of P = exp(S - lse). Where scores are large, P
// of a row may sum to anything between 1 / n and n instead of 1. For blocks with such rows P is first summed over their
// keys. The logarithm of the sum is the remainder, which is subtracted after lse.

#include <cmath>
#include <cstdint>

#include "cpu/tuning.h"
#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_BACKWARD_REST_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_BACKWARD_REST_INL_H_
#undef ANYFLASH_CPU_BACKWARD_REST_INL_H_
#else
#define ANYFLASH_CPU_BACKWARD_REST_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

/// log(sum), if it is small enough to be a rounding error of lse: half a unit in the last place, and a little for the
/// sum itself. A larger value means that lse covers more keys than this call has. Then lse is right, and the remainder
/// is 0.
template <class T>
T RestOf(T lse, double sum) {
  const T distance = std::nextafter(std::abs(lse), std::numeric_limits<T>::infinity()) - std::abs(lse);
  const double rest = std::log(sum);
  return std::abs(rest) <= 0.75 * double(distance) ? static_cast<T>(rest) : T(0);
}

/// Fills terms.rest of query block `block` of (b, h), whose other terms are known. memory: that of LoadedBlocks.
/// after_block() is called after each key block that is read.
template <class E, class T, class AfterBlock>
void FindRests(const Problem& problem, const ExecutionPlan& plan, std::int64_t b, std::int64_t h, std::int32_t block,
               T* memory, RowTerms<T>& terms, const AfterBlock& after_block) {
  const auto at = terms.at(b, h, block);
  const auto far = [&](int row) { return std::abs(terms.lse[at + row]) >= T(tuning::kFarLse); };  // dead rows have 0
  bool any = false;
  for (int row = 0; row < kTile; ++row) any |= far(row);
  if (!any) return;
  double sums[kTile] = {}, behind[kTile] = {};  // the sum's compensation (Kahan): it must be more accurate than lse
  LoadedBlocks<T, E> blocks(problem, plan, terms, memory);
  blocks.load_queries(b, h, block);
  const auto& [start, runs] = plan.group(b, h).keys_of_query_block;
  for (auto i = start[block]; i < start[block + 1]; ++i)
    for (std::int32_t key = runs[i].first; key < runs[i].first + runs[i].count; ++key) {
      blocks.load_keys(b, h / (problem.heads_q / problem.heads_kv), key, false);
      blocks.compute(b, h, runs[i].kind, false, false);
      for (int row = 0; row < kTile; ++row) {
        double of_tile = 0;
        for (int col = 0; col < kTile; ++col) of_tile += blocks.p_numbers[row * kTile + col];
        const double more = of_tile + behind[row], sum = sums[row] + more;
        behind[row] = more - (sum - sums[row]);
        sums[row] = sum;
      }
      after_block();
    }
  for (int row = 0; row < kTile; ++row) {
    if (!far(row)) continue;
    const T lse = terms.lse[at + row];
    if (problem.sink.given()) sums[row] += std::exp(ReadHeadNumber(problem.sink, b, h) - double(lse));
    terms.rest[at + row] = RestOf(lse, sums[row]);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_BACKWARD_REST_INL_H_
