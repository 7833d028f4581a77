// Results without arithmetic: fills a strided tensor with one number.
#include <cstring>

#include "cpu/backend.h"

namespace anyflash::cpu {
namespace {

void store(char* to, ElementType type, double value) {
  switch (type) {
    case ElementType::float32: {
      const auto narrow = static_cast<float>(value);
      std::memcpy(to, &narrow, sizeof(narrow));
      break;
    }
    case ElementType::float64: std::memcpy(to, &value, sizeof(value)); break;
    default: std::memset(to, 0, element_size(type));  // 16-bit results are only ever filled with 0
  }
}

void fill(char* data, const TensorView& view, int axis, double value) {
  if (axis == view.rank) return store(data, view.type, value);
  const auto step = view.strides[axis] * static_cast<std::int64_t>(element_size(view.type));
  for (std::int64_t i = 0; i < view.shape[axis]; ++i) fill(data + i * step, view, axis + 1, value);
}

}  // namespace

void fill(const Problem&, const TensorView& view, double value) { fill(static_cast<char*>(view.data), view, 0, value); }

}  // namespace anyflash::cpu
