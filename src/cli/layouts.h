// The positions of the axes of q, k, v and similar tensors in each layout, and tensors viewed as (batch, heads,
// sequence..., channels).
#pragma once

#include <anyflash/attention.h>

#include <functional>
#include <string>

#include "owned_tensor.h"

namespace anyflash::cli {

inline std::string name_of(Layout layout) { return layout_names[int(layout)]; }
inline std::string name_of(Align align) { return align_names[int(align)]; }

/// The shape of a tensor with the given sizes. For thd and qkv, batch is 1 and left out.
Shape shape_in(Layout layout, std::int64_t batch, std::int64_t heads, const Shape& sequence, std::int64_t channels);

/// The same tensor with its axes in the order of bhsd. For qkv: `view` is (N, L, D).
TensorView as_bhsd(const TensorView& view, Layout layout);

/// One index of the first axis, e.g. q of a packed qkv.
TensorView part(const TensorView& view, std::int64_t index);

/// Calls visit(index, offset) for every element in row-major order; offset counts elements from view.data.
void for_each_element(const TensorView& view, const std::function<void(std::int64_t, std::int64_t)>& visit);

}  // namespace anyflash::cli
