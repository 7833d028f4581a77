// The kernels' workspace.
#pragma once

#include <cstdint>
#include <string>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <anyflash/tensor.h>

#include "hwy/aligned_allocator.h"

namespace anyflash::cpu {

/// Rows of a key block, and of a query cell.
constexpr int kTile = 64;
/// Most rows of a query block.
constexpr int kMaxQueryRows = 256;

/// Row length of a thread's own copy of rows: a multiple of any instruction set's vectors, so that no kernel has a
/// remainder.
inline std::int64_t padded(std::int64_t channels) { return (channels + 15) / 16 * 16; }

/// Requests large pages for the memory: new memory costs a call time per page.
inline void prefer_large_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::size_t bytes) {
#ifdef __linux__
  constexpr std::uintptr_t page = std::uintptr_t{2} << 20;
  const auto first = reinterpret_cast<std::uintptr_t>(memory), end = first + bytes;
  const auto from = (first + page - 1) / page * page, to = end / page * page;
  if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);  // the request may be refused
#endif
}

/// `count` numbers, aligned to vectors. Throws Error if there is no memory.
template <class T>
hwy::AlignedFreeUniquePtr<T[]> allocate(std::int64_t count) {
  auto memory = hwy::AllocateAligned<T>(static_cast<std::size_t>(count > 1 ? count : 1));
  if (!memory) {
    const auto bytes = std::to_string(count * sizeof(T));
    throw Error(Error::Kind::memory, "no memory for a workspace of " + bytes + " bytes");
  }
  prefer_large_pages(memory.get(), static_cast<std::size_t>(count) * sizeof(T));
  return memory;
}

/// Divides an allocation into parts. Without memory it only counts bytes: a call lays out its workspace once without
/// memory, to know its size, and once with it.
class Parts {
 public:
  explicit Parts(char* memory) : memory_(memory) {}

  /// `count` numbers, aligned to vectors; null if there is no memory.
  template <class T>
  T* take(std::int64_t count) {
    T* const part = memory_ ? reinterpret_cast<T*>(memory_ + bytes_) : nullptr;
    bytes_ += (count * static_cast<std::int64_t>(sizeof(T)) + HWY_ALIGNMENT - 1) / HWY_ALIGNMENT * HWY_ALIGNMENT;
    return part;
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  std::int64_t bytes_ = 0;
};

}  // namespace anyflash::cpu
