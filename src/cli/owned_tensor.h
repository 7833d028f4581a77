// A tensor that owns its memory: for data read from files, and for results.
#pragma once

#include <anyflash/tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace anyflash::cli {

using Shape = std::vector<std::int64_t>;

struct OwnedTensor {
  ElementType type = ElementType::float32;
  Shape shape;
  Shape strides;  ///< in elements; row-major unless the file was in Fortran order
  std::shared_ptr<std::byte[]> data;

  /// Row-major, zeroed. Throws Error if the sizes are negative, overflow, or need more memory than the machine has.
  static OwnedTensor zeros(ElementType type, const Shape& shape);

  std::int64_t elements() const;
  std::size_t bytes() const { return std::size_t(elements()) * element_size(type); }
  TensorView view() const;
};

using NamedTensors = std::vector<std::pair<std::string, OwnedTensor>>;

/// Row-major strides of a shape.
Shape row_major(const Shape& shape);

/// The bytes of a tensor; throws Error (beginning with `label`) if a size is negative, the product overflows, the rank
/// is over TensorView::max_rank, or the machine's memory could not hold it.
std::size_t checked_bytes(const std::string& label, const Shape& shape, ElementType type);

/// "(2, 3)", "(4,)" as NumPy writes it.
std::string shape_text(const Shape& shape);

/// "1.5 GiB", "312 bytes".
std::string bytes_text(double bytes);

/// The text as one line for people: control characters, which names in files may contain, as \x0a; long texts are cut
/// in the middle.
std::string one_line(const std::string& text);

/// Throws an Error of kind value, with the text as from `one_line`.
[[noreturn]] void fail(const std::string& line);
/// The same, for an entry that a file does not have.
[[noreturn]] void fail_no_entry(const std::string& path, const std::string& entry, const std::vector<std::string>& has);

}  // namespace anyflash::cli
