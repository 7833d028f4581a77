// Mask words of 64 bits, one for each entry of a cell: intervals, progressions, products of dimensions, bytes packed to
// bits.
#pragma once

#include <bit>
#include <cstring>

#include "rules/ranges.h"

namespace anyflash::rules {

using Word = std::uint64_t;

inline constexpr Word all_bits = ~Word{0};

/// A cell's entries along one dimension: entry e is at coordinate base + step * e, step > 0.
struct Line {
  std::int64_t base, step;
};

ANYFLASH_HD Word low_bits(std::int64_t n) { return n >= 64 ? all_bits : n <= 0 ? 0 : (Word{1} << n) - 1; }

/// Bits first .. last; either may lie outside 0 .. 63.
ANYFLASH_HD Word bits_between(std::int64_t first, std::int64_t last) {
  if (first > 63 || last < 0 || first > last) return 0;
  first = larger(first, 0);
  last = smaller(last, 63);
  return all_bits << first & all_bits >> (63 - last);
}

/// The entries e with lo <= base + step * e <= hi.
ANYFLASH_HD_CALL Word interval_bits(const Line& line, std::int64_t lo, std::int64_t hi) {
  lo -= line.base;
  hi -= line.base;
  if (line.step != 1) {
    if (hi < 0) return 0;
    hi /= line.step;
    lo = lo <= 0 ? 0 : (lo + line.step - 1) / line.step;
  }
  return bits_between(lo, hi);
}

/// Bits first, first + period, ...
ANYFLASH_HD Word progression_bits(std::int64_t first, std::int64_t period) {
  if (first > 63) return 0;
  Word bits = 1;
  ANYFLASH_UNROLL(1)
  for (auto length = period; length < 64; length *= 2) bits |= bits << length;
  return bits << first;
}

ANYFLASH_HD std::int64_t remainder_of(std::int64_t a, std::int64_t m) {  // 0 .. m - 1
  if ((m & (m - 1)) == 0) return a & (m - 1);
  const auto r = a % m;
  return r < 0 ? r + m : r;
}

/// The entries e with base + step * e = residue modulo m, m > 1.
ANYFLASH_HD Word residue_bits(const Line& line, std::int64_t m, std::int64_t residue) {
  auto missing = remainder_of(residue - line.base, m);
  if (line.step == 1) return progression_bits(missing, m);
  const auto step = line.step % m;
  if (step == 0) return missing == 0 ? all_bits : 0;
  // Without the inverse of step modulo m the first matching entry is searched; the next one gives the period.
  std::int64_t first = -1;
  ANYFLASH_UNROLL(1)
  for (std::int64_t e = 0, at = 0; e < 64; ++e) {
    if (at == missing) {
      if (first >= 0) return progression_bits(first, e - first);
      first = e;
    }
    at += step;
    if (at >= m) at -= m;
  }
  return first < 0 ? 0 : Word{1} << first;
}

ANYFLASH_HD Word range_bits(const Line& line, const Range& range) {
  const auto interval = interval_bits(line, range.lo, range.hi);
  return range.modulus == 1 || interval == 0 ? interval : interval & residue_bits(line, range.modulus, range.residue);
}

/// The cell's word in which entry e has bit e_i of `bits`: the word of a condition on dimension i only. Products of
/// dimensions are `&` of these.
ANYFLASH_HD_CALL Word spread(const Int3& extent, int i, Word bits) {
  constexpr Word one_a_row_of_8 = 0x0101010101010101, one_a_row_of_4 = 0x1111111111111111,
                 one_a_plane = 0x0001000100010001;
  if (extent[2] == 64) return i == 2 ? bits : bits & 1 ? all_bits : 0;
  if (extent[2] == 8) {
    if (i == 2) return (bits & 0xff) * one_a_row_of_8;
    if (i == 0) return bits & 1 ? all_bits : 0;
    const Word diagonal = ((bits & 0xff) * one_a_row_of_8) & 0x8040201008040201;  // bit r in row r, at column r
    return ((diagonal + 0x7f7f7f7f7f7f7f7f) >> 7 & one_a_row_of_8) * 0xff;
  }
  if (i == 2) return (bits & 0xf) * one_a_row_of_4;
  if (i == 1) return ((bits & 1) | (bits & 2) << 3 | (bits & 4) << 6 | (bits & 8) << 9) * 0xf * one_a_plane;
  return ((bits & 1) | (bits & 2) << 15 | (bits & 4) << 30 | (bits & 8) << 45) * 0xffff;
}

/// Bit e: byte e is not zero, n <= 64 bytes, `stride` apart.
ANYFLASH_HD Word nonzero_bits(const std::uint8_t* bytes, std::int64_t stride, std::int64_t n) {
  Word bits = 0;
  std::int64_t e = 0;
  const auto take_one = [&] { bits |= Word{bytes[e * stride] != 0} << e, ++e; };
  if (stride == 1) {  // eight at a time
    constexpr Word low7 = 0x7f7f7f7f7f7f7f7f;
#if defined(__CUDA_ARCH__)  // from where loads are aligned
    ANYFLASH_UNROLL(1)
    while (e < n && reinterpret_cast<std::uintptr_t>(bytes + e) % 8 != 0) take_one();
#endif
    ANYFLASH_UNROLL(4)
    for (; e + 8 <= n; e += 8) {
      Word eight;
#if defined(__CUDA_ARCH__)
      eight = *reinterpret_cast<const Word*>(bytes + e);
#else
      std::memcpy(&eight, bytes + e, 8);
#endif
      const Word ones = (((eight & low7) + low7) | eight) >> 7 & 0x0101010101010101;
      bits |= (ones * 0x0102040810204080) >> 56 << e;
    }
  }
  ANYFLASH_UNROLL(4)
  while (e < n) take_one();
  return bits;
}

/// Bit e: values[e * step] == value, n <= 64.
ANYFLASH_HD Word equal_bits(const std::int32_t* values, std::int64_t step, std::int64_t n, std::int32_t value) {
#if !defined(__CUDA_ARCH__)
  if (step == 1 && n == 64) {  // a loop that compilers turn into vectors
    std::uint8_t equal[64];
    for (int e = 0; e < 64; ++e) equal[e] = values[e] == value;
    return nonzero_bits(equal, 1, 64);
  }
#endif
  Word bits = 0;
  ANYFLASH_UNROLL(4)
  for (std::int64_t e = 0; e < n; ++e) bits |= Word{values[e * step] == value} << e;
  return bits;
}

ANYFLASH_HD int lowest_bit(Word word) {  // its number; `word` must not be 0
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(word)) - 1;
#else
  return std::countr_zero(word);
#endif
}

/// Bit i of `word` at the i-th bit of `places`; all other bits are undefined.
ANYFLASH_HD Word deposited(Word word, Word places) {
  if (places == all_bits || word == 0 || word == all_bits) return word;
  Word result = 0;
  ANYFLASH_UNROLL(1)
  for (; places != 0; places &= places - 1, word >>= 1) result |= places & -places & -(word & 1);
  return result;
}

}  // namespace anyflash::rules
