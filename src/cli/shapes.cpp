#include "shapes.h"

#include <charconv>

#include "owned_tensor.h"

namespace anyflash::cli {

SequenceShape parse_shape(const std::string& option, const std::string& text) {
  SequenceShape shape;
  std::int64_t entries = 1;
  const char *place = text.data(), *end = place + text.size();
  for (;;) {
    std::int64_t size = 0;
    const auto [after, error] = std::from_chars(place, end, size);
    if (error != std::errc() || size < 0 || size > 1 << 30 || (after < end && *after != 'x') || shape.size() == 3)
      fail(option + ": '" + text + "', expected 1 to 3 sizes up to 2^30 such as 4096 or 512x512");
    shape.push_back(size);
    entries *= size;
    if (entries > INT32_MAX) fail(option + ": '" + text + "', expected at most 2147483647 entries");
    if (after == end) return shape;
    place = after + 1;
  }
}

SequenceShape parse_keys(const std::string& text, const SequenceShape& queries) {
  const auto keys = text.empty() ? queries : parse_shape("--keys", text);
  if (keys.size() == queries.size()) return keys;
  fail("--keys: " + text_of(keys) + ", expected " + std::to_string(queries.size()) + " sizes as in --shape");
}

std::string text_of(const SequenceShape& shape) {
  std::string text;
  for (const auto size : shape) text += (text.empty() ? "" : "x") + std::to_string(size);
  return text;
}

std::int64_t volume(const SequenceShape& shape) {
  std::int64_t product = 1;
  for (const auto size : shape) product *= size;
  return product;
}

}  // namespace anyflash::cli
