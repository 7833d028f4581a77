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
