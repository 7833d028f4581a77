#include "problem/layout.h"

#include <algorithm>

namespace anyflash::problem {

const char* layout_name(Layout layout) {
  if (layout <= Layout::thd) return layout_names[int(layout)];
  fail_value("layout", "number " + std::to_string(int(layout)) + ", expected one of Layout");
}

Axes axes_of(Layout layout, Argument query) {
  const int rank = query.view.rank;
  const auto check_rank = [&](int least, int most, const char* expected) {
    if (rank < least || rank > most) {
      fail_value(query.name,
                 "rank " + std::to_string(rank) + ", expected " + expected + " in layout " + layout_name(layout));
    }
  };
  switch (layout) {
    case Layout::qkv: check_rank(4, 4, "4"); return {3, 1, -1, 0, 2, 1};
    case Layout::thd: check_rank(3, 3, "3"); return {3, 1, -1, 1, 2, 0};
    default: check_rank(4, 6, "4, 5 or 6");
  }
  switch (layout) {
    case Layout::bhsd: return {rank, rank - 3, 0, 1, rank - 1, 2};
    case Layout::bshd: return {rank, rank - 3, 0, rank - 2, rank - 1, 1};
    default: return {rank, rank - 3, 0, 1, 2, 3};
  }
}

TensorView part(const TensorView& qkv, int index) {
  TensorView result = qkv;
  result.rank = qkv.rank - 1;
  std::copy(qkv.shape.begin() + 1, qkv.shape.end(), result.shape.begin());
  std::copy(qkv.strides.begin() + 1, qkv.strides.end(), result.strides.begin());
  if (result.elements() > 0 && qkv.data) {
    result.data = static_cast<char*>(qkv.data) + index * qkv.strides[0] * std::int64_t(element_size(qkv.type));
  }
  return result;
}

}  // namespace anyflash::problem

namespace anyflash {

ResultShapes result_shapes(const TensorView& q, const TensorView& v, const Options& options) {
  using namespace problem;
  const bool packed = options.layout == Layout::qkv, paged = options.page_table.given();
  check_given({"query", q});
  const auto axes = axes_of(options.layout, {"query", q});
  const auto query = packed ? part(q, 0) : q;
  const auto& value = packed ? query : v;
  const auto& value_axes = paged && !packed ? page_axes : axes;
  check_given({"value", value});
  check_size("value", "rank", value.rank, value_axes.rank, paged ? " with a page_table" : " as in query");
  ResultShapes shapes;
  shapes.out.assign(query.shape.begin(), query.shape.begin() + query.rank);
  shapes.out[axes.channel] = value.shape[value_axes.channel];
  std::int64_t queries = 1;
  for (int i = 0; i < axes.dimensions; ++i) {
    const auto size = query.shape[axes.sequence + i];
    if (__builtin_mul_overflow(queries, size, &queries)) fail_value("query", "shape " + shape_text(q) + " overflows");
  }
  if (axes.batch >= 0) shapes.lse.push_back(query.shape[axes.batch]);
  shapes.lse.push_back(query.shape[axes.head]);
  shapes.lse.push_back(queries);
  return shapes;
}

}  // namespace anyflash
