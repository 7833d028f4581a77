// The checks of every tensor of a call, and the form of their messages: "key: head size 72, expected 64 as in query".
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "problem/tensor.h"

namespace anyflash::problem {

/// A tensor, with the name that its user knows.
struct Argument {
  const char* name;
  const TensorView& view;
};

[[noreturn]] void fail(Error::Kind kind, const std::string& line);
[[noreturn]] void fail_value(const char* name, const std::string& text);

void check_given(Argument argument);
/// "bias: given ..., expected none": `why` follows "given".
void check_absent(Argument argument, const char* why);

/// Accepts only floating-point types.
void check_floating(Argument argument);
void check_type(Argument argument, ElementType expected, const char* as_in = "");
/// One of two types.
void check_type(Argument argument, ElementType one, ElementType other);

/// "key: head size 72, expected 64 as in query"
void check_size(const char* name, const char* what, std::int64_t size, std::int64_t expected, const char* as_in = "");
/// The rank must have been checked.
void check_shape(Argument argument, std::span<const std::int64_t> expected);

/// Checks rank, device, sizes, strides and pointer, so that every element has an address, computed without overflow.
/// data: whether the pointer will be used.
void check_memory(Argument argument, Device device, bool data = true);

/// Checks that no two elements of a tensor to be written overlap. Needs check_memory.
void check_writable(Argument argument);

/// Whether two elements of a tensor overlap. Needs check_memory. True in doubt, which only unusual strides cause.
bool overlaps_itself(const TensorView& view);

/// Whether two tensors have a byte in common. Needs check_memory. True in doubt, which only unusual strides cause.
bool share_memory(const TensorView& a, const TensorView& b);

/// The bytes between the first and past the last element, as addresses. Empty if there are no elements.
struct Extent {
  std::int64_t low, high;
};
Extent extent_of(const TensorView& view);

}  // namespace anyflash::problem
