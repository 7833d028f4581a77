// Several arrays in one allocation.
#pragma once

#include <cstdint>

namespace anyflash::cuda {

/// Divides an allocation into parts, each aligned to 256 bytes. Without one (null) it only counts bytes.
class MemoryParts {
 public:
  explicit MemoryParts(char* memory) : memory_(memory) {}

  /// Null if it only counts, or for no numbers.
  template <class T>
  T* take(std::int64_t count) {
    const auto at = bytes_;
    bytes_ += (count * static_cast<std::int64_t>(sizeof(T)) + 255) / 256 * 256;
    return count > 0 && memory_ ? reinterpret_cast<T*>(memory_ + at) : nullptr;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  std::int64_t bytes_ = 0;
};

}  // namespace anyflash::cuda
