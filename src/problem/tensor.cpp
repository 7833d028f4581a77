// Tensor views: construction, sizes and names of element types.
#include "problem/tensor.h"

#include <algorithm>
#include <limits>

namespace anyflash {
namespace {

void set_shape(TensorView& view, std::initializer_list<std::int64_t> shape) {
  if (shape.size() > TensorView::max_rank) {
    throw Error(Error::Kind::value, "tensor: rank " + std::to_string(shape.size()) + ", expected at most " +
                                        std::to_string(TensorView::max_rank));
  }
  view.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape.begin());
}

}  // namespace

TensorView::TensorView(void* data, ElementType type, std::initializer_list<std::int64_t> shape, Device device)
    : data(data), type(type), device(device) {
  set_shape(*this, shape);
  set_row_major_strides();
}

TensorView::TensorView(void* data, ElementType type, std::initializer_list<std::int64_t> shape,
                       std::initializer_list<std::int64_t> strides, Device device)
    : data(data), type(type), device(device) {
  set_shape(*this, shape);
  if (strides.size() != shape.size()) {
    throw Error(Error::Kind::value, "tensor: " + std::to_string(strides.size()) + " strides, expected " +
                                        std::to_string(shape.size()) + " as in its shape");
  }
  std::copy(strides.begin(), strides.end(), this->strides.begin());
}

void TensorView::set_row_major_strides() {
  std::int64_t stride = 1;
  for (int i = rank - 1; i >= 0; --i) {
    strides[i] = stride;
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(shape[i], 1), &stride)) {
      throw Error(Error::Kind::value, "tensor: a shape of more than 2^63 elements");
    }
  }
}

std::int64_t TensorView::elements() const {
  std::int64_t product = 1;
  bool overflow = false;
  for (int i = 0; i < rank; ++i) {
    if (shape[i] == 0) return 0;
    overflow |= __builtin_mul_overflow(product, shape[i], &product);
  }
  return overflow ? std::numeric_limits<std::int64_t>::max() : product;
}

std::size_t element_size(ElementType type) {
  switch (type) {
    case ElementType::float16:
    case ElementType::bfloat16: return 2;
    case ElementType::float32:
    case ElementType::int32: return 4;
    case ElementType::float64:
    case ElementType::int64: return 8;
    case ElementType::boolean:
    case ElementType::uint8: return 1;
  }
  return 0;
}

const char* element_name(ElementType type) {
  switch (type) {
    case ElementType::float16: return "float16";
    case ElementType::bfloat16: return "bfloat16";
    case ElementType::float32: return "float32";
    case ElementType::float64: return "float64";
    case ElementType::boolean: return "boolean";
    case ElementType::uint8: return "uint8";
    case ElementType::int32: return "int32";
    case ElementType::int64: return "int64";
  }
  return "unknown";
}

std::int64_t integer_at(const TensorView& view, std::int64_t index) {
  const auto at = index * view.strides[0];
  return view.type == ElementType::int64 ? static_cast<const std::int64_t*>(view.data)[at]
                                         : static_cast<const std::int32_t*>(view.data)[at];
}

std::string shown(std::string_view text, std::size_t most) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string line;
  for (const unsigned char c : text.substr(0, most)) {
    if (c >= ' ' && c <= '~') {
      line += char(c);
    } else {
      line += {'\\', 'x', digits[c / 16], digits[c % 16]};
    }
  }
  return line + (text.size() > most ? "..." : "");
}

std::string text_of(std::span<const std::int64_t> numbers) {
  std::string text = "(";
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (i == TensorView::max_rank) return text + ", ...)";
    text += (i ? ", " : "") + std::to_string(numbers[i]);
  }
  return text + ")";
}

std::string shape_text(const TensorView& view) { return text_of({view.shape.data(), std::size_t(view.rank)}); }

std::string device_name(Device device) {
  if (device.kind == DeviceKind::cpu) return "cpu";
  return (device.kind == DeviceKind::cuda ? "cuda:" : "tiles:") + std::to_string(device.index);
}

}  // namespace anyflash
