// Where neighbouring ids change: the one pass over document ids that a call makes.
#pragma once

#include <cstdint>

namespace anyflash::rules {

/// The end of the equal ids that begin at entry i, of `count` ids in all.
template <typename T>
std::int64_t end_of_run(const T* ids, std::int64_t stride, std::int64_t count, std::int64_t i) {
  constexpr std::int64_t together = 64;
  const T id = ids[i * stride];
  auto end = i + 1;
  // Compilers turn the inner loop into vectors. Where ids change often, the last one of the 64 mostly shows it.
  while (stride == 1 && end + together <= count && ids[end + together - 1] == id) {
    T differ = 0;
    for (std::int64_t n = 0; n < together; ++n) differ |= ids[end + n] ^ id;
    if (differ != 0) break;
    end += together;
  }
  while (end < count && ids[end * stride] == id) ++end;
  return end;
}

}  // namespace anyflash::rules
