// Which part of a partial tile is computed: for a few rows at a time only the keys that one of them sees, and for a few
// keys at a time only the rows that see one of them.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/numbers.h"
#include "cpu/tuning.h"

namespace anyflash::cpu {

/// Keys begin .. begin + width - 1 of 64, whole steps of kSpanStep.
struct Span {
  int begin = 0, width = 0;
};

/// The span of the keys `seen`.
inline Span span_of(std::uint64_t seen) {
  using tuning::kSpanStep;
  if (seen == 0) return {};
  const int begin = std::countr_zero(seen) / kSpanStep * kSpanStep;
  return {begin, (64 - std::countl_zero(seen) + kSpanStep - 1) / kSpanStep * kSpanStep - begin};
}

/// The keys that one of `rows` rows sees.
inline std::uint64_t seen_by(const std::uint64_t* words, std::int32_t rows) {
  std::uint64_t seen = 0;
  for (std::int32_t row = 0; row < rows; ++row) seen |= words[row];
  return seen;
}

}  // namespace anyflash::cpu
