#include "shapes.h"

#include <charconv>

#include "owned_tensor.h"

namespace anyflash::cli {

SequenceShape parse_shape(const std::string& option, const std::string& text) {
  SequenceShape shape;
  const char *place = text.data(), *end = place + text.size();
  for (;;) {
    std::int64_t size = 0;
    const auto [after, error] = std::from_chars(place, end, size);
    if (error != std::errc() || size < 0 || size > INT32_MAX || (after < end && *after != 'x') || shape.size() == 3)
      fail(option + ": '" + text + "', expected 1 to 3 sizes such as 4096 or 512x512");
    shape.push_back(size);
    if (after == end) return shape;
    place = after + 1;
  }
}

std::string text_of(const SequenceShape& shape) {
  std::string text;
  for (const auto size : shape) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}

std::int64_t volume(const SequenceShape& shape) {
  std::int64_t product = 1;
  for (const auto size : shape)
    if (__builtin_mul_overflow(product, size, &product)) fail("shape " + text_of(shape) + " overflows");
  return product;
}

}  // namespace anyflash::cli
