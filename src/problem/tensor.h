// Simple queries of a tensor view.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <anyflash/tensor.h>

namespace anyflash {

/// Has it no elements? The same as elements() == 0, but cheaper.
inline bool is_empty(const TensorView& view) {
  for (int i = 0; i < view.rank; ++i)
    if (view.shape[i] == 0) return true;
  return false;
}

/// A number of an int32 or int64 tensor of rank 1.
std::int64_t integer_at(const TensorView& view, std::int64_t index);

/// "(2, 3)"
std::string text_of(std::span<const std::int64_t> numbers);
std::string shape_text(const TensorView& view);

}  // namespace anyflash
