#include "problem/checks.h"

#include <algorithm>
#include <limits>

namespace anyflash::problem {
namespace {

// Half of the range of 63 bits, so that two extents may be added.
constexpr std::int64_t most_bytes = std::int64_t{1} << 62;

std::int64_t bytes_of_element(const TensorView& view) { return static_cast<std::int64_t>(element_size(view.type)); }

/// Offsets in bytes of the lowest and the highest element from the pointer. False if they are out of range.
bool reach(const TensorView& view, std::int64_t& low, std::int64_t& high) {
  low = high = 0;
  const auto bytes = bytes_of_element(view);
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] <= 1) continue;
    std::int64_t distance;
    if (__builtin_mul_overflow(view.shape[i] - 1, view.strides[i], &distance) ||
        __builtin_mul_overflow(distance, bytes, &distance) || distance <= -most_bytes || distance >= most_bytes) {
      return false;
    }
    (distance < 0 ? low : high) += distance;
    if (high - low >= most_bytes) return false;
  }
  return true;
}

void check_sizes(Argument argument) {
  const auto& view = argument.view;
  std::int64_t bytes = bytes_of_element(view);
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] < 0 || view.shape[i] > std::numeric_limits<std::int32_t>::max()) {
      fail_value(argument.name, "shape " + shape_text(view) + ", expected sizes from 0 to 2147483647");
    }
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(view.shape[i], 1), &bytes) || bytes >= most_bytes) {
      fail_value(argument.name, "shape " + shape_text(view) + ", expected less than 2^62 bytes");
    }
  }
}

}  // namespace

void fail(Error::Kind kind, const std::string& line) { throw Error(kind, line); }

void fail_value(const char* name, const std::string& text) {
  fail(Error::Kind::value, std::string(name) + ": " + text);
}

void check_given(Argument argument) {
  if (!argument.view.given()) fail_value(argument.name, "not given");
}

void check_absent(Argument argument, const char* why) {
  if (argument.view.given()) fail_value(argument.name, std::string("given ") + why);
}

void check_floating(Argument argument) {
  if (argument.view.type <= ElementType::float64) return;
  fail(Error::Kind::type, std::string(argument.name) + ": type " + element_name(argument.view.type) +
                              ", expected float16, bfloat16, float32 or float64");
}

void check_type(Argument argument, ElementType expected, const char* as_in) {
  if (argument.view.type == expected) return;
  fail(Error::Kind::type, std::string(argument.name) + ": type " + element_name(argument.view.type) + ", expected " +
                              element_name(expected) + as_in);
}

void check_type(Argument argument, ElementType one, ElementType other) {
  if (argument.view.type == one || argument.view.type == other) return;
  fail(Error::Kind::type, std::string(argument.name) + ": type " + element_name(argument.view.type) + ", expected " +
                              element_name(one) + " or " + element_name(other));
}

void check_size(const char* name, const char* what, std::int64_t size, std::int64_t expected, const char* as_in) {
  if (size == expected) return;
  fail_value(name, std::string(what) + " " + std::to_string(size) + ", expected " + std::to_string(expected) + as_in);
}

void check_shape(Argument argument, std::span<const std::int64_t> expected) {
  if (std::equal(expected.begin(), expected.end(), argument.view.shape.begin())) return;
  fail_value(argument.name, "shape " + shape_text(argument.view) + ", expected " + text_of(expected));
}

void check_memory(Argument argument, Device device, bool data) {
  const auto& view = argument.view;
  if (view.rank > TensorView::max_rank) {
    fail_value(argument.name,
               "rank " + std::to_string(view.rank) + ", expected at most " + std::to_string(TensorView::max_rank));
  }
  if (element_size(view.type) == 0) {
    fail(Error::Kind::type, std::string(argument.name) + ": element type number " + std::to_string(int(view.type)) +
                                ", expected one of ElementType");
  }
  if (view.device != device && device_name(view.device) != device_name(device)) {
    fail(Error::Kind::device,
         std::string(argument.name) + ": on " + device_name(view.device) + ", expected " + device_name(device));
  }
  check_sizes(argument);
  if (is_empty(view)) return;
  if (data && !view.data) {
    fail_value(argument.name, "data pointer null, expected " + std::to_string(view.elements()) + " elements");
  }
  std::int64_t low, high;
  const auto address = data ? reinterpret_cast<std::uintptr_t>(view.data) : std::uintptr_t(most_bytes) - 1;
  // No process has addresses from 2^62 on; so the sum of an address and an offset stays within 63 bits.
  if (!reach(view, low, high) || address >= std::uintptr_t(most_bytes) || std::int64_t(address) < -low) {
    fail_value(argument.name, "strides " + text_of({view.strides.data(), std::size_t(view.rank)}) +
                                  ", expected elements within the address space");
  }
  if (!data) return;
  if (address % element_size(view.type) != 0) {
    fail_value(argument.name, std::string("data pointer misaligned, expected a multiple of ") +
                                  std::to_string(element_size(view.type)) + " bytes for " + element_name(view.type));
  }
}

void check_writable(Argument argument) {
  const auto& view = argument.view;
  if (is_empty(view)) return;
  // Sorted by stride, each step is larger than all smaller ones reach together; otherwise only a search can tell.
  std::array<std::pair<std::int64_t, std::int64_t>, TensorView::max_rank> steps;  // stride, size
  int count = 0;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] <= 1) continue;
    const std::pair step{std::abs(view.strides[i]), view.shape[i]};
    int at = count++;
    for (; at > 0 && step < steps[at - 1]; --at) steps[at] = steps[at - 1];
    steps[at] = step;
  }
  std::int64_t reached = 0;
  for (int i = 0; i < count; ++i) {
    if (steps[i].first <= reached) {
      if (!overlaps_itself(view)) return;
      fail_value(argument.name, "strides " + text_of({view.strides.data(), std::size_t(view.rank)}) + " for shape " +
                                    shape_text(view) + ", expected a place of its own for each element");
    }
    reached += steps[i].first * (steps[i].second - 1);
  }
}

Extent extent_of(const TensorView& view) {
  const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(view.data));
  if (is_empty(view)) return {address, address};
  std::int64_t low, high;
  reach(view, low, high);
  return {address + low, address + high + bytes_of_element(view)};
}

}  // namespace anyflash::problem
