// replaces cuda/hopper/instructions.cuh
#pragma once
#include "cuda/common/instructions.cuh"
namespace anyflash::cuda {
inline std::uint32_t describe_tile(const void* tile, std::uint32_t panels) { return panels >> 4 << 16 | (shared_address(tile) & 0x3ffff) >> 4; }
inline void products_begin() {}
inline void show_to_products() {}
// element (row of the operand along M or N, k)
template <class E> float operand(std::uint32_t d, bool transposed, int n, int k) {
  const std::uint32_t start = (d & 0x3fff) << 4, panels = (d >> 16 & 0x3fff) << 4;
  std::uint32_t at = transposed ? start + k * 128 + n % 64 * 2 + n / 64 * panels : start + n / 8 * 1024 + n % 8 * 128 + k * 2;
  at ^= (at >> 7 & 7) << 4;
  std::uint16_t x; memcpy(&x, memory + at, 2);
  return number(x, E());
}
}
