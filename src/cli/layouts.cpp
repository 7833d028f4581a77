#include "layouts.h"

#include <algorithm>

namespace anyflash::cli {

namespace {

Shape shape_of(const TensorView& view) { return {view.shape.begin(), view.shape.begin() + view.rank}; }

}  // namespace

Shape shape_in(Layout layout, std::int64_t batch, std::int64_t heads, const Shape& sequence, std::int64_t channels) {
  Shape shape;
  const auto add_sequence = [&] { shape.insert(shape.end(), sequence.begin(), sequence.end()); };
  if (layout != Layout::thd && layout != Layout::qkv) shape.push_back(batch);
  if (layout == Layout::bhsd || layout == Layout::bhds || layout == Layout::qkv) shape.push_back(heads);
  if (layout == Layout::bhds) shape.push_back(channels);
  add_sequence();
  if (layout == Layout::bshd || layout == Layout::thd) shape.push_back(heads);
  if (layout != Layout::bhds) shape.push_back(channels);
  return shape;
}

TensorView as_bhsd(const TensorView& view, Layout layout) {
  // The sizes 0, 1, 2... stand for the view's own axes, so that shape_in's inverse needs no second table.
  const int missing = layout == Layout::thd || layout == Layout::qkv ? 1 : 0;
  const int sequence_axes = view.rank + missing - 3;
  const int rank = sequence_axes + 3;
  Shape axes(std::size_t(sequence_axes), 0);
  for (int i = 0; i < sequence_axes; ++i) axes[std::size_t(i)] = 2 + i;
  const auto order = shape_in(layout, 0, 1, axes, rank - 1);  // order[axis of view] = axis of the result
  TensorView result = view;
  result.rank = rank;
  for (int i = 0; i < rank; ++i) result.shape[std::size_t(i)] = 1, result.strides[std::size_t(i)] = 0;
  for (int axis = 0; axis < view.rank; ++axis) {
    const auto to = std::size_t(order[std::size_t(axis)]);
    result.shape[to] = view.shape[std::size_t(axis)];
    result.strides[to] = view.strides[std::size_t(axis)];
  }
  return result;
}

TensorView part(const TensorView& view, std::int64_t index) {
  TensorView result = view;
  result.data = static_cast<char*>(view.data) + index * view.strides[0] * std::int64_t(element_size(view.type));
  --result.rank;
  std::copy(view.shape.begin() + 1, view.shape.end(), result.shape.begin());
  std::copy(view.strides.begin() + 1, view.strides.end(), result.strides.begin());
  return result;
}

void for_each_element(const TensorView& view, const std::function<void(std::int64_t, std::int64_t)>& visit) {
  const auto shape = shape_of(view);
  std::int64_t count = 1;
  for (const auto size : shape) count *= size;
  Shape place(shape.size(), 0);
  std::int64_t offset = 0;
  for (std::int64_t index = 0; index < count; ++index) {
    visit(index, offset);
    for (std::size_t axis = shape.size(); axis-- > 0;) {  // like an odometer
      offset += view.strides[axis];
      if (++place[axis] < shape[axis]) break;
      offset -= view.strides[axis] * shape[axis];
      place[axis] = 0;
    }
  }
}

}  // namespace anyflash::cli
