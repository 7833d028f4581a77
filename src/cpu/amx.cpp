// A tile register holds 16 rows of 64 bytes. Two by two tiles of c stay in registers while k runs; each step multiplies
// two tiles of a with two of b (Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on AMX). Where
// k is only two steps, two by two tiles of a stay instead, and the loop runs over the columns of b and c.
#include "cpu/amx.h"

#include <algorithm>

#ifdef __AMX_BF16__  // only this file is compiled with it

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace anyflash::cpu::amx {
namespace {

constexpr int kSide = 16;  // rows of a tile, and its elements of four bytes a row

bool ask() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned bf16 = 1u << 22, tile = 1u << 24, conversions = 1u << 5;  // AVX512_BF16
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & bf16) == 0 || (edx & tile) == 0) return false;
  constexpr long ask_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || (eax & conversions) == 0) return false;
  return syscall(SYS_arch_prctl, ask_permission, tile_data) == 0;
}

struct alignas(64) Configuration {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

/// What `configure` last set in this thread's `Alone`: 0 at its start, and -1 outside it, where other code may
/// configure the tiles between two products.
thread_local int known_rows = -1;

/// A compiler barrier around GCC's intrinsics, which do not declare that they read memory. Without it the compiler may
/// move earlier stores behind them, and later stores before them.
void finish_stores(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

/// The registers of `block`: 0 to 3 hold two by two tiles of c, 4 and 5 of a, 6 and 7 of b; first_rows: of the upper
/// tiles of c and a. In `two_steps`, whose tiles are all full: 0 and 1 of c, 2 and 3 of b, 4 to 7 of a.
void configure(int first_rows) {
  if (known_rows == first_rows) return;
  if (known_rows >= 0) known_rows = first_rows;
  Configuration configuration;
  std::fill_n(configuration.row_bytes, 8, std::uint16_t{4 * kSide});
  std::fill_n(configuration.rows, 8, std::uint8_t{kSide});
  for (const int of_first_rows : {0, 1, 4}) configuration.rows[of_first_rows] = static_cast<std::uint8_t>(first_rows);
  finish_stores(&configuration);
  _tile_loadconfig(&configuration);
}

/// c += a b over 16 elements of k.
template <bool kBelow, bool kBeside>
void step(const std::uint32_t* a, std::int64_t a_row, const std::uint32_t* b, std::int64_t ldb) {
  _tile_loadd(6, b, ldb * 4);
  _tile_loadd(4, a, a_row * 4);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kBelow) {
    _tile_loadd(5, a + kSide * a_row, a_row * 4);
    _tile_dpbf16ps(2, 5, 6);
  }
  if constexpr (kBeside) {
    _tile_loadd(7, b + kSide, ldb * 4);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kBelow) _tile_dpbf16ps(3, 5, 7);
  }
}

/// The same over the last `count` elements, padded with zeros to 16: memory behind them may be uninitialised.
template <bool kBelow, bool kBeside>
void last_step(std::int64_t rows, std::int64_t count, const std::uint32_t* a, std::int64_t a_row,
               const std::uint32_t* b, std::int64_t ldb) {
  constexpr int columns = kBeside ? 2 * kSide : kSide;
  alignas(64) std::uint32_t left[2 * kSide * kSide] = {}, right[kSide * columns] = {};
  for (std::int64_t row = 0; row < rows; ++row) std::copy_n(a + row * a_row, count, left + row * kSide);
  for (std::int64_t row = 0; row < count; ++row) std::copy_n(b + row * ldb, columns, right + row * columns);
  finish_stores(left), finish_stores(right);
  step<kBelow, kBeside>(left, kSide, right, columns);
  finish_stores(left), finish_stores(right);
}

/// `rows` x 16 or 32 numbers of c, starting at the elements a_first and b_first of the factors; more than 16 rows means
/// 32.
template <bool kBelow, bool kBeside>
void block(bool add, std::int64_t rows, std::int64_t k, std::span<const Factors> factors, std::int64_t a_first,
           std::int64_t a_row, std::int64_t b_first, std::int64_t ldb, float* c, std::int64_t ldc) {
  float *const below = c + kSide * ldc, *const beside = c + kSide;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (add) {
    _tile_loadd(0, c, ldc * 4);
    if constexpr (kBeside) _tile_loadd(1, beside, ldc * 4);
    if constexpr (kBelow) _tile_loadd(2, below, ldc * 4);
    if constexpr (kBelow && kBeside) _tile_loadd(3, below + kSide, ldc * 4);
  }
  const auto whole = k / kSide * kSide;
  for (const Factors& of : factors) {
    const auto *const a = of.a + a_first, *const b = of.b + b_first;
    for (std::int64_t i = 0; i < whole; i += kSide) step<kBelow, kBeside>(a + i, a_row, b + i * ldb, ldb);
    if (whole < k) last_step<kBelow, kBeside>(rows, k - whole, a + whole, a_row, b + whole * ldb, ldb);
  }
  _tile_stored(0, c, ldc * 4);
  if constexpr (kBeside) _tile_stored(1, beside, ldc * 4);
  if constexpr (kBelow) _tile_stored(2, below, ldc * 4);
  if constexpr (kBelow && kBeside) _tile_stored(3, below + kSide, ldc * 4);
}

/// c = or += a b where k is two steps, for whole pairs of tiles: two by two tiles of a stay in registers, and the loop
/// runs over the columns of b.
template <bool kAdd>
void two_steps(std::int64_t rows, std::int64_t n, const std::uint32_t* a, std::int64_t a_row, const std::uint32_t* b,
               std::int64_t ldb, float* c, std::int64_t ldc) {
  for (std::int64_t row = 0; row < rows; row += 2 * kSide) {
    const auto *const left = a + row * a_row, *const left_below = left + kSide * a_row;
    _tile_loadd(4, left, a_row * 4);
    _tile_loadd(5, left + kSide, a_row * 4);
    _tile_loadd(6, left_below, a_row * 4);
    _tile_loadd(7, left_below + kSide, a_row * 4);
    for (std::int64_t col = 0; col < n; col += kSide) {
      float *const to = c + row * ldc + col, *const below = to + kSide * ldc;
      if constexpr (kAdd) {
        _tile_loadd(0, to, ldc * 4);
        _tile_loadd(1, below, ldc * 4);
      } else {
        _tile_zero(0);
        _tile_zero(1);
      }
      _tile_loadd(2, b + col, ldb * 4);
      _tile_dpbf16ps(0, 4, 2);
      _tile_dpbf16ps(1, 6, 2);
      _tile_loadd(3, b + col + kSide * ldb, ldb * 4);
      _tile_dpbf16ps(0, 5, 3);
      _tile_dpbf16ps(1, 7, 3);
      _tile_stored(0, to, ldc * 4);
      _tile_stored(1, below, ldc * 4);
    }
  }
}

}  // namespace

Alone::Alone() { known_rows = 0; }
Alone::~Alone() { known_rows = -1; }

bool available() {
  static const bool answer = ask();
  return answer;
}

void multiply(bool add, std::int64_t rows, std::int64_t k, std::int64_t n, std::span<const Factors> factors,
              std::int64_t a_row, std::int64_t ldb, float* c, std::int64_t ldc) {
  constexpr auto pair = 2 * kSide;
  finish_stores(c);
  if (factors.size() == 1 && k == pair && rows % pair == 0 && n % pair == 0) {
    const auto [a, b] = factors[0];
    configure(kSide);
    return add ? two_steps<true>(rows, n, a, a_row, b, ldb, c, ldc)
               : two_steps<false>(rows, n, a, a_row, b, ldb, c, ldc);
  }
  const auto whole = rows / kSide * kSide, pairs = whole / pair * pair;
  const auto all_columns = [&]<bool kBelow>(std::int64_t row, std::int64_t count) {
    std::int64_t col = 0;
    for (; col + 2 * kSide <= n; col += 2 * kSide)
      block<kBelow, true>(add, count, k, factors, row * a_row, a_row, col, ldb, c + row * ldc + col, ldc);
    if (col < n) block<kBelow, false>(add, count, k, factors, row * a_row, a_row, col, ldb, c + row * ldc + col, ldc);
  };
  if (whole > 0) configure(kSide);
  for (std::int64_t row = 0; row < pairs; row += 2 * kSide) all_columns.template operator()<true>(row, 2 * kSide);
  if (pairs < whole) all_columns.template operator()<false>(pairs, kSide);
  if (whole < rows) {
    configure(static_cast<int>(rows - whole));
    all_columns.template operator()<false>(whole, rows - whole);
  }
}

}  // namespace anyflash::cpu::amx

#else

namespace anyflash::cpu::amx {

Alone::Alone() {}
Alone::~Alone() {}
bool available() { return false; }
void multiply(bool, std::int64_t, std::int64_t, std::int64_t, std::span<const Factors>, std::int64_t, std::int64_t,
              float*, std::int64_t) {}

}  // namespace anyflash::cpu::amx

#endif
