// The epilogue of a row's softmax: the sink, the division, the statistics that the caller asked for.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/numbers.h"
#include "cpu/pairs-inl.h"
#include "cpu/softmax-inl.h"
#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_FINISH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_FINISH_INL_H_
#undef ANYFLASH_CPU_FINISH_INL_H_
#else
#define ANYFLASH_CPU_FINISH_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

/// out += P V over the keys `bad` of 64, whose rows of v hold a NaN or an infinity; p: (64), v: (64, width).
template <class T, class E>
void AddRowsNotFinite(std::uint64_t bad, const E* p, const E* v, std::int64_t width, std::int64_t channels, T* out) {
  for (; bad; bad &= bad - 1) {
    const int key = std::countr_zero(bad);
    for (std::int64_t i = 0; i < channels; ++i) out[i] += InRow(p, key) * InColumn(v, width, key, i);
  }
}

/// Adds the sink, a logit without a value, to the row's softmax.
template <class T>
void AddSink(T sink, RowEnd<T>& end, T* out, std::int64_t width) {
  const T together = std::max(end.largest, sink);
  if (together == -kInfinity<T> && sink == sink) return;
  const T factor = std::exp(end.largest - together);
  if (factor != 1) {
    Rescale(factor, out, width);
    end.sum *= factor;
  }
  end.largest = together;
  end.sum += std::exp(sink - together);
}

/// The largest finite number of an element type. A mean of finite numbers is never larger, however its weights are
/// rounded.
template <class T>
T LargestNumber(ElementType type) {
  switch (type) {
    case ElementType::float16: return T(65504);
    case ElementType::bfloat16: return T(0x1.fep127);
    default: return std::numeric_limits<T>::max();
  }
}

/// Does the rule let a query, entry `row` of a block, see any key? Only needed where no score is above -inf.
inline bool SeesAKey(const ExecutionPlan& plan, std::int64_t b, std::int64_t h, std::int32_t block, std::int32_t row) {
  const auto& group = plan.group(b, h);
  const auto& [start, runs] = group.keys_of_query_block;
  const Int3 query = plan.query_grid.box(block).entry(row);
  for (auto i = start[block]; i < start[block + 1]; ++i)
    for (std::int32_t key = runs[i].first; key < runs[i].first + runs[i].count; ++key)
      if (runs[i].kind == TileClass::full || rules::word(group.program, query, plan.key_grid.box(key))) return true;
  return false;
}

/// Finishes entry `row` of a block of (b, h). end: over its keys; the sink is added to it. out: (padded d_v) sum of P
/// V, becomes the result. False if that is not finite although the sum of P is: V is not finite, or a sum of P V has
/// overflowed.
template <class T>
HWY_NOINLINE bool FinishRow(const Problem& problem, const ExecutionPlan& plan, std::int64_t b, std::int64_t h,
                            std::int32_t block, std::int32_t row, RowEnd<T>& end, T* out) {
  const hn::ScalableTag<T> d;
  const auto width = padded(problem.d_v);
  if (problem.sink.given() && (end.sum != 0 || SeesAKey(plan, b, h, block, row)))
    AddSink(static_cast<T>(ReadHeadNumber(problem.sink, b, h)), end, out, width);
  if (end.sum == 0) {  // it sees no key, or only keys with a score of -inf, and has no sink above that
    end.largest = -kInfinity<T>;
    std::fill_n(out, width, T(0));
    return true;
  }
  const bool nan = end.sum != end.sum;
  if (nan && end.largest != kInfinity<T>) end.largest = end.sum;  // a NaN among the scores, which comparisons ignore
  auto different = hn::Zero(d);                                   // x - x of all numbers: NaN if one is not finite
  for (std::int64_t i = 0; i < width; i += hn::Lanes(d)) {
    const auto x = hn::Div(hn::Load(d, out + i), hn::Set(d, end.sum));
    different = hn::Or(different, hn::Sub(x, x));
    hn::Store(x, d, out + i);
  }
  const bool finite = hn::AllTrue(d, hn::Eq(different, hn::Zero(d)));
  if (finite && element_size(problem.type) == 2) {
    const auto most = hn::Set(d, LargestNumber<T>(problem.type));
    for (std::int64_t i = 0; i < width; i += hn::Lanes(d))
      hn::Store(hn::Clamp(hn::Load(d, out + i), hn::Neg(most), most), d, out + i);
  }
  return nan || finite;
}

/// Stores a second walk's results, whose P sums to a half, only where the first overflowed. out (d_v), its sums,
/// becomes what is stored at `at`: the stored result if that is finite, or if the second is NaN (0 times an infinity of
/// V).
template <class T>
void KeepStored(const Problem& problem, std::int64_t at, T* out) {
  const T most = LargestNumber<T>(problem.type);
  for (std::int64_t i = 0; i < problem.d_v; ++i) {
    const double stored = ReadNumber(problem.out.data, problem.type, at + i * problem.out.channel);
    if (std::isfinite(stored) || out[i] != out[i]) {
      out[i] = static_cast<T>(stored);
    } else {
      out[i] = std::isfinite(out[i]) ? std::clamp(2 * out[i], -most, most) : out[i];
    }
  }
}

/// Stores the statistics of that row that the caller asked for.
template <class T>
void StoreStatistics(const Problem& problem, const ExecutionPlan& plan, std::int64_t b, std::int64_t h,
                     std::int32_t block, std::int32_t row, const RowEnd<T>& end) {
  const auto query = rules::flat_index(plan.query_grid.box(block).entry(row), problem.q_size);
  const auto store = [&](const RowStatistic& statistic, T value) {
    const auto at = b * statistic.batch + h * statistic.head + query * statistic.query;
    reinterpret_cast<T*>(statistic.data)[at] = value;
  };
  if (problem.row_max.given()) store(problem.row_max, end.largest);
  if (problem.row_sum.given()) store(problem.row_sum, end.sum);
  if (problem.lse.given()) store(problem.lse, end.lse());
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_FINISH_INL_H_
