#include "numbers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace anyflash::cli {

namespace {

struct Format {
  int mantissa_bits, least_exponent;
  double largest;
};

Format format_of(ElementType type) {
  switch (type) {
    case ElementType::float16: return {10, -14, 65504.0};
    case ElementType::bfloat16: return {7, -126, std::ldexp(255.0, 120)};
    case ElementType::float32: return {23, -126, double(std::numeric_limits<float>::max())};
    default: return {52, -1022, std::numeric_limits<double>::max()};
  }
}

double half_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double value = std::ldexp(double(mantissa + (exponent ? 1024 : 0)), (exponent ? exponent : 1) - 25);
  if (exponent == 31) value = mantissa ? std::nan("") : HUGE_VAL;
  return bits & 0x8000 ? -value : value;
}

std::uint16_t half_bits(double value) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return std::uint16_t(sign | 0x7e00);
  const double size = std::fabs(rounded(ElementType::float16, value));
  if (std::isinf(size)) return std::uint16_t(sign | 0x7c00);
  if (size < std::ldexp(1.0, -14)) return std::uint16_t(sign | int(std::ldexp(size, 24)));
  const int exponent = std::ilogb(size);
  return std::uint16_t(sign | (exponent + 15) << 10 | (int(std::ldexp(size, 10 - exponent)) & 1023));
}

template <class T>
double load_as(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * std::int64_t(sizeof(T)), sizeof(T));
  return double(value);
}

template <class T>
void store_as(void* data, std::int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * std::int64_t(sizeof(T)), &value, sizeof(T));
}

}  // namespace

double load_number(ElementType type, const void* data, std::int64_t index) {
  switch (type) {
    case ElementType::float16: return half_value(std::uint16_t(load_as<std::uint16_t>(data, index)));
    case ElementType::bfloat16: return std::bit_cast<float>(std::uint32_t(load_as<std::uint16_t>(data, index)) << 16);
    case ElementType::float32: return load_as<float>(data, index);
    case ElementType::float64: return load_as<double>(data, index);
    case ElementType::int32: return load_as<std::int32_t>(data, index);
    case ElementType::int64: return load_as<std::int64_t>(data, index);
    default: return load_as<std::uint8_t>(data, index);
  }
}

void store_number(ElementType type, void* data, std::int64_t index, double value) {
  switch (type) {
    case ElementType::float16: return store_as(data, index, half_bits(value));
    case ElementType::bfloat16: {
      const auto bits = std::bit_cast<std::uint32_t>(float(rounded(type, value))) >> 16;
      return store_as(data, index, std::uint16_t(bits));
    }
    case ElementType::float32: return store_as(data, index, float(value));
    case ElementType::float64: return store_as(data, index, value);
    case ElementType::int32: return store_as(data, index, std::int32_t(value));
    case ElementType::int64: return store_as(data, index, std::int64_t(value));
    default: return store_as(data, index, std::uint8_t(value));
  }
}

double rounded(ElementType type, double value) {
  if (type == ElementType::float64 || value == 0 || !std::isfinite(value)) return value;
  const auto format = format_of(type);
  double result;
  if (std::fabs(value) < std::ldexp(1.0, format.least_exponent)) {
    const double unit = std::ldexp(1.0, format.least_exponent - format.mantissa_bits);
    result = std::nearbyint(value / unit) * unit;
  } else {  // rounds the bits of the double, of which `dropped` are cut; a carry runs into the exponent correctly
    const int dropped = 52 - format.mantissa_bits;
    auto bits = std::bit_cast<std::uint64_t>(value);
    bits += (std::uint64_t(1) << (dropped - 1)) - 1 + (bits >> dropped & 1);
    result = std::bit_cast<double>(bits >> dropped << dropped);
  }
  return std::fabs(result) > format.largest ? std::copysign(HUGE_VAL, value) : result;
}

double ulp(ElementType type, double value) {
  const auto format = format_of(type);
  const int exponent = value == 0 || !std::isfinite(value) ? format.least_exponent : std::ilogb(value);
  return std::ldexp(1.0, std::max(exponent, format.least_exponent) - format.mantissa_bits);
}

bool is_floating(ElementType type) { return type <= ElementType::float64; }

const std::vector<std::string>& float_type_names() {
  static const std::vector<std::string> names = {"float16", "bfloat16", "float32", "float64"};
  return names;
}

std::optional<ElementType> float_type(const std::string& name) {
  const auto& names = float_type_names();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return {};
  return ElementType(found - names.begin());
}

}  // namespace anyflash::cli
