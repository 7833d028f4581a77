#include "owned_tensor.h"

#include <anyflash/names.h>

#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace anyflash::cli {

std::string one_line(const std::string& text) {
  std::string line;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool second_page = text[i] == '\xc2' && (text[i + 1] & 0xe0) == 0x80;  // U+0080 to U+009F in UTF-8
    if (second_page) ++i;
    const auto c = static_cast<unsigned char>(text[i]);
    char code[8];
    std::snprintf(code, sizeof code, second_page || c < 32 || c == 127 ? "\\x%02x" : "%c", c);
    line += code;
  }
  constexpr std::size_t longest = 400, kept = 190;  // at each end
  if (line.size() <= longest) return line;
  const auto inside_character = [&](std::size_t at) { return (line[at] & 0xc0) == 0x80; };
  auto from = kept, to = line.size() - kept;
  while (from > 0 && inside_character(from)) --from;
  while (to < line.size() && inside_character(to)) ++to;
  return line.replace(from, to - from, " ... ");
}

void fail_no_entry(const std::string& path, const std::string& entry, const std::vector<std::string>& has) {
  fail(path + ": no tensor '" + entry + "' in the file" + did_you_mean(entry, Names(has.begin(), has.end())));
}

void fail(const std::string& line) { throw Error(Error::Kind::value, one_line(line)); }

Shape row_major(const Shape& shape) {
  Shape strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
  return strides;
}

std::string shape_text(const Shape& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string bytes_text(double bytes) {
  const char* units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 6; ++unit) bytes /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
  return text;
}

std::size_t checked_bytes(const std::string& label, const Shape& shape, ElementType type) {
  if (shape.size() > std::size_t(TensorView::max_rank))
    fail(label + ": " + std::to_string(shape.size()) + " axes, expected at most " +
         std::to_string(TensorView::max_rank));
  // Sizes of 0 are left out of the product, so that strides cannot overflow either.
  std::int64_t product = std::int64_t(element_size(type));
  bool empty = false;
  for (const auto size : shape) {
    if (size < 0) fail(label + ": negative size in shape " + shape_text(shape));
    if (size == 0) empty = true;
    else if (__builtin_mul_overflow(product, size, &product))
      fail(label + ": shape " + shape_text(shape) + " overflows");
  }
  if (empty) return 0;
  const auto memory = double(sysconf(_SC_PHYS_PAGES)) * double(sysconf(_SC_PAGE_SIZE));
  if (double(product) > memory)
    fail(label + ": shape " + shape_text(shape) + " takes " + bytes_text(double(product)) + ", this machine has " +
         bytes_text(memory) + " of memory");
  return std::size_t(product);
}

OwnedTensor OwnedTensor::zeros(ElementType type, const Shape& shape) {
  const auto bytes = checked_bytes("tensor", shape, type);
  OwnedTensor tensor{type, shape, row_major(shape), std::make_shared<std::byte[]>(bytes > 0 ? bytes : 1)};
  return tensor;
}

std::int64_t OwnedTensor::elements() const {
  std::int64_t product = 1;
  for (const auto size : shape) product *= size;
  return product;
}

TensorView OwnedTensor::view() const {
  TensorView view;
  view.data = data.get();
  view.type = type;
  view.rank = int(shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) {
    view.shape[i] = shape[i];
    view.strides[i] = strides[i];
  }
  return view;
}

}  // namespace anyflash::cli
