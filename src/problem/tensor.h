// Small questions to a tensor view.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <anyflash/tensor.h>

namespace anyflash {

/// A number of an int32 or int64 tensor of rank 1.
std::int64_t integer_at(const TensorView& view, std::int64_t index);

/// "(2, 3)"
std::string text_of(std::span<const std::int64_t> numbers);
std::string shape_text(const TensorView& view);

}  // namespace anyflash
