// bfloat16 products by the matrix tiles of Intel's AMX, where the machine has them and the system allows them.
#pragma once

#include <cstdint>
#include <span>

namespace anyflash::cpu::amx {

/// Asks the system for the tiles, once.
bool available();

/// While a thread has one, only `multiply` uses that thread's tiles: they are configured once, not for each product.
struct Alone {
  Alone();
  ~Alone();
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;
};

struct Factors {
  const std::uint32_t *a, *b;
};

/// c (rows, n) = or += the sum of a (rows, k) b (k, n) over all factors, in their order. Elements of a and b are pairs
/// of bfloat16 along k; c is float32. Rows of a, b and c are a_row, ldb and ldc elements apart. n: whole vectors of 16.
void multiply(bool add, std::int64_t rows, std::int64_t k, std::int64_t n, std::span<const Factors> factors,
              std::int64_t a_row, std::int64_t ldb, float* c, std::int64_t ldc);

}  // namespace anyflash::cpu::amx
