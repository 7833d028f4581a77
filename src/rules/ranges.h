// The per-dimension rules (local, window, tiles, neighbourhood) in one dimension: a query coordinate sees the key
// coordinates of an interval that are in one residue class. The same holds the other way round, for a key coordinate.
#pragma once

#include "rules/program.h"

namespace anyflash::rules {

ANYFLASH_HD std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
ANYFLASH_HD std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }
ANYFLASH_HD std::int64_t clamped(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}

/// Greater than any difference of two coordinates.
inline constexpr std::int64_t unlimited = std::int64_t{1} << 62;

/// The coordinates c with lo <= c <= hi and c = residue modulo modulus.
struct Range {
  std::int64_t lo, hi, modulus, residue;
};

ANYFLASH_HD bool by_dimension(AtomKind kind) {
  return kind == AtomKind::local || kind == AtomKind::window || kind == AtomKind::tiles ||
         kind == AtomKind::neighbourhood;
}

/// The start of a kernel of `kernel` places centred on place x among `places` places (clamped to stay inside where it
/// fits).
ANYFLASH_HD std::int64_t kernel_start(std::int64_t x, std::int64_t kernel, std::int64_t places) {
  return clamped(x - kernel / 2, 0, larger(0, places - kernel));
}

/// The places first .. last whose kernel covers place y. kernel_start never decreases with x, so they are contiguous.
ANYFLASH_HD void kernel_covers(std::int64_t y, std::int64_t kernel, std::int64_t places, std::int64_t& first,
                               std::int64_t& last) {
  const auto last_start = larger(0, places - kernel), half = kernel / 2;
  const auto least_start = y - kernel + 1;
  first = least_start <= 0 ? 0 : least_start > last_start ? unlimited : least_start + half;
  last = y >= last_start ? unlimited : y + half;
}

/// The number of places of residue class r modulo d among coordinates 0 .. size - 1.
ANYFLASH_HD std::int64_t class_places(std::int64_t size, std::int64_t r, std::int64_t d) {
  return size > r ? (size - r + d - 1) / d : 0;
}

/// The keys that query coordinate x sees in dimension i, whose frame has `size` coordinates.
ANYFLASH_HD Range keys_of(const Atom& atom, int i, std::int64_t x, std::int64_t size) {
  const std::int64_t a = atom.a[i], b = atom.b[i];
  switch (atom.kind) {
    case AtomKind::local: return {x - a, x + a, b, x & (b - 1)};
    case AtomKind::tiles: {
      const auto start = kernel_start(x / a, b, (size + a - 1) / a);
      return {start * a, (start + b) * a - 1, 1, 0};
    }
    case AtomKind::neighbourhood: {
      const auto residue = b == 1 ? 0 : x % b, place = b == 1 ? x : x / b;
      if (atom.causal >> i & 1) return {x - (a - 1) * b, x, b, residue};
      const auto start = kernel_start(place, a, class_places(size, residue, b));
      return {start * b + residue, (start + a - 1) * b + residue, b, residue};
    }
    default:  // window
      return {x - a, x + b, 1, 0};
  }
}

/// The query coordinates that see key coordinate y in dimension i, whose frame has `size` coordinates.
ANYFLASH_HD Range queries_of(const Atom& atom, int i, std::int64_t y, std::int64_t size) {
  const std::int64_t a = atom.a[i], b = atom.b[i];
  switch (atom.kind) {
    case AtomKind::local: return {y - a, y + a, b, y & (b - 1)};
    case AtomKind::tiles: {
      std::int64_t first, last;
      kernel_covers(y / a, b, (size + a - 1) / a, first, last);
      return {first == unlimited ? unlimited : first * a, last == unlimited ? unlimited : (last + 1) * a - 1, 1, 0};
    }
    case AtomKind::neighbourhood: {
      const auto residue = b == 1 ? 0 : y % b, place = b == 1 ? y : y / b;
      if (atom.causal >> i & 1) return {y, y + (a - 1) * b, b, residue};
      std::int64_t first, last;
      kernel_covers(place, a, class_places(size, residue, b), first, last);
      return {first == unlimited ? unlimited : first * b + residue, last == unlimited ? unlimited : last * b + residue,
              b, residue};
    }
    default:  // window
      return {y - b, y + a, 1, 0};
  }
}

}  // namespace anyflash::rules
