// Sums over rows in a thread's own memory, and the row terms that the backward pass computes once: delta, dlse, lse and
// its remainder.

#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_BACKWARD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_BACKWARD_ROWS_INL_H_
#undef ANYFLASH_CPU_BACKWARD_ROWS_INL_H_
#else
#define ANYFLASH_CPU_BACKWARD_ROWS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

/// sum = a + b, count numbers in whole vectors; sum may be a or b.
template <class T>
void AddRows(const T* a, const T* b, std::int64_t count, T* sum) {
  const hn::ScalableTag<T> d;
  for (std::int64_t i = 0; i < count; i += hn::Lanes(d))
    hn::Store(hn::Add(hn::Load(d, a + i), hn::Load(d, b + i)), d, sum + i);
}

template <class D, class T>
HWY_INLINE hn::Vec<D> DotColumns(D d, const T* a, const T* b, std::int64_t depth) {
  auto total = hn::Zero(d);
  for (std::int64_t i = 0; i < depth; ++i)
    total = hn::MulAdd(hn::Load(d, a + i * kTile), hn::Load(d, b + i * kTile), total);
  return total;
}

/// sum[row] = a[row] . b[row] for `rows` rows of `width` channels, which may be changed; memory: 2 * 64 * width. The
/// terms are added first to last, as Gemm adds those of dO V^T: so delta and dP of a query that sees one key cancel
/// exactly.
template <class E, class T>
void DotRows(T* a, T* b, int rows, std::int64_t width, T* memory, T* sum) {
  const hn::ScalableTag<T> d;
  auto *a_t = reinterpret_cast<E*>(memory), *b_t = reinterpret_cast<E*>(memory + kTile * width);
  TransposeOperand(a, width, a_t, rows);
  TransposeOperand(b, width, b_t, rows);
  for (int row = 0; row < rows; row += static_cast<int>(hn::Lanes(d)))
    hn::Store(DotColumns(d, a_t + row, b_t + row, Depth<E>(width)), d, sum + row);
}

/// Fills the terms of query block `block` of (b, h). memory: 4 * 64 * padded(d_v).
template <class E, class T>
void FindRowTerms(const Problem& problem, const ExecutionPlan& plan, std::int64_t b, std::int64_t h, std::int32_t block,
                  T* memory, RowTerms<T>& terms) {
  const auto width = padded(problem.d_v);
  T *out = memory, *dout = memory + kTile * width;
  const Box box = plan.query_grid.box(block);
  const RowAddresses outs(problem.out, b, h, box, problem.q_size);
  const RowAddresses douts(problem.dout, b, h, box, problem.q_size);
  const auto rows = outs.used();
  LoadRows(problem.out, problem.type, outs, rows, problem.d_v, out, width);
  LoadRows(problem.dout, problem.type, douts, rows, problem.d_v, dout, width);
  HWY_ALIGN T delta[kTile] = {};
  DotRows<E>(dout, out, rows, width, memory + 2 * kTile * width, delta);
  const auto at = terms.at(b, h, block);
  std::uint64_t live = 0;
  for (int row = 0; row < kTile; ++row) {
    T lse = 0, dlse = 0;
    const Int3 c = box.entry(row);
    if (rules::inside(c, problem.q_size)) {
      const auto query = rules::flat_index(c, problem.q_size);
      const auto statistic = [&](const RowStatistic& s) {
        return reinterpret_cast<const T*>(s.data)[b * s.batch + h * s.head + query * s.query];
      };
      lse = statistic(problem.lse);
      if (lse == -std::numeric_limits<T>::infinity()) {
        lse = 0;
      } else {
        live |= std::uint64_t{1} << row;
        if (problem.dlse.given()) dlse = statistic(problem.dlse);
      }
    }
    terms.lse[at + row] = lse;
    terms.rest[at + row] = 0;
    terms.dlse[at + row] = dlse;
    terms.delta[at + row] = delta[row];
  }
  terms.live[terms.block(b, h, block)] = live;
}

/// A query block's share of dSink.
template <class T>
void FindSinkTerm(const Problem& problem, std::int64_t b, std::int64_t h, std::int32_t block, RowTerms<T>& terms) {
  const double sink = ReadHeadNumber(problem.sink, b, h);
  const auto at = terms.at(b, h, block), live = static_cast<std::int64_t>(terms.live[terms.block(b, h, block)]);
  double sum = 0;
  for (int row = 0; row < kTile; ++row) {
    if ((live >> row & 1) == 0) continue;
    const double p = std::exp(sink - double(terms.lse[at + row]) - double(terms.rest[at + row]));
    sum += p * (double(terms.dlse[at + row]) - double(terms.delta[at + row]));
  }
  terms.sink[terms.block(b, h, block)] = sum;
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_BACKWARD_ROWS_INL_H_
