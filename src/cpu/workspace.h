// Memory that kernels work in: taken once a thread of the caller and kept for its next call.
#pragma once

#include <cstdint>
#include <string>

#include <anyflash/tensor.h>

#include "hwy/aligned_allocator.h"

namespace anyflash::cpu {

/// Rows of a key block, and of a query cell.
constexpr int kTile = 64;
/// Most rows of a query block.
constexpr int kMaxQueryRows = 256;

/// Row length of a thread's own copy of rows: whole vectors of any instruction set, so that no kernel has a remainder.
inline std::int64_t padded(std::int64_t channels) { return (channels + 15) / 16 * 16; }

template <class T>
hwy::AlignedFreeUniquePtr<T[]> allocate(std::int64_t count) {
  auto memory = hwy::AllocateAligned<T>(static_cast<std::size_t>(count > 1 ? count : 1));
  if (!memory) {
    const auto bytes = std::to_string(count * sizeof(T));
    throw Error(Error::Kind::memory, "no memory for a workspace of " + bytes + " bytes");
  }
  return memory;
}

/// `count` numbers, aligned to vectors, valid until the calling thread asks again. Throws Error if there is no memory.
template <class T>
T* workspace(std::int64_t count) {
  thread_local hwy::AlignedFreeUniquePtr<T[]> memory;
  thread_local std::int64_t size = 0;
  if (count > size) {
    size = 0;
    memory.reset();
    memory = allocate<T>(count);
    size = count;
  }
  return memory.get();
}

}  // namespace anyflash::cpu
