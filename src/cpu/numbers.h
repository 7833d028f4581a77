// Single numbers in memory, of any floating-point type.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hwy/base.h"
#include "problem/problem.h"

namespace anyflash::cpu {

/// x rounded to the type in memory. (Highway's own conversion turns a NaN into an infinity.)
template <class Memory, class T>
Memory Narrow(T x) {
  if constexpr (sizeof(Memory) >= 4) {
    return static_cast<Memory>(x);
  } else {
    constexpr std::uint16_t nan = std::is_same_v<Memory, hwy::float16_t> ? 0x7e00 : 0x7fc0;
    if (x != x) return hwy::BitCastScalar<Memory>(nan);
    return hwy::ConvertScalarTo<Memory>(static_cast<float>(x));
  }
}

inline double ReadNumber(const char* data, ElementType type, std::int64_t i) {
  switch (type) {
    case ElementType::float64: return reinterpret_cast<const double*>(data)[i];
    case ElementType::float32: return reinterpret_cast<const float*>(data)[i];
    case ElementType::bfloat16: return hwy::F32FromBF16(reinterpret_cast<const hwy::bfloat16_t*>(data)[i]);
    default: return hwy::F32FromF16(reinterpret_cast<const hwy::float16_t*>(data)[i]);
  }
}

inline void WriteNumber(char* data, ElementType type, std::int64_t i, double x) {
  switch (type) {
    case ElementType::float64: reinterpret_cast<double*>(data)[i] = x; break;
    case ElementType::float32: reinterpret_cast<float*>(data)[i] = static_cast<float>(x); break;
    case ElementType::bfloat16: reinterpret_cast<hwy::bfloat16_t*>(data)[i] = Narrow<hwy::bfloat16_t>(x); break;
    default: reinterpret_cast<hwy::float16_t*>(data)[i] = Narrow<hwy::float16_t>(x);
  }
}

inline double ReadHeadNumber(const HeadNumbers& numbers, std::int64_t b, std::int64_t h) {
  return ReadNumber(numbers.data, numbers.type, b * numbers.batch + h * numbers.head);
}

}  // namespace anyflash::cpu
