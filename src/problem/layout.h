// The positions of the axes in each layout.
#pragma once

#include <anyflash/attention.h>

#include "problem/checks.h"

namespace anyflash::problem {

/// Axis numbers of q, k, v, out or a gradient. batch or head is -1 where the layout has no such axis (its size is then
/// 1).
struct Axes {
  int rank, dimensions;  ///< dimensions: of the sequence
  int batch, head, channel, sequence;

  std::int64_t batch_of(const TensorView& view) const { return batch < 0 ? 1 : view.shape[batch]; }
};

const char* layout_name(Layout layout);

/// The axes of a query. Throws Error if its rank does not fit the layout. For a packed qkv: the axes of one of its
/// three parts.
Axes axes_of(Layout layout, Argument query);

/// The axes of keys or values in pages: (pages, page size, heads, channels); pages replace the batch.
constexpr Axes page_axes{4, 1, 0, 2, 3, 1};

/// One of the three parts of a packed qkv.
TensorView part(const TensorView& qkv, int index);

}  // namespace anyflash::problem
