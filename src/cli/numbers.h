// Element types as numbers: reading, rounding and writing single elements. For checks, not for speed.
#pragma once

#include <anyflash/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace anyflash::cli {

/// Element `index` of an array, exactly.
double load_number(ElementType type, const void* data, std::int64_t index);

/// Writes `value` rounded to nearest, ties to even.
void store_number(ElementType type, void* data, std::int64_t index, double value);

/// `value` rounded to a floating-point type.
double rounded(ElementType type, double value);

/// The distance between `value` and the next number of a floating-point type: one unit in the last place.
double ulp(ElementType type, double value);

bool is_floating(ElementType type);

/// The four types attention is computed in, by their names ("bfloat16", ...).
std::optional<ElementType> float_type(const std::string& name);
const std::vector<std::string>& float_type_names();

/// The type of lse: float64 for float64, else float32.
inline ElementType statistic_type(ElementType type) {
  return type == ElementType::float64 ? ElementType::float64 : ElementType::float32;
}

}  // namespace anyflash::cli
