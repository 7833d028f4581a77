// Split-bfloat16 emulated float32. A float32 number is the sum of three bfloat16 terms, its terms:
// high + middle + low. They have 24 bits, exact from 2^-110 up. A product of two numbers is then six products of terms
// on the tensor cores; the three others are below 2^-26 of it. (Henry, Tang and Heinecke 2019.) The tensor cores
// truncate where float32 rounds, so a long sum on them would lose a little at each step. Products of high terms have 16
// bits, so a sum of only few of them is almost exact. Of 64 products, the high ones of the first half make one sum. All
// the small ones, followed by the high ones of the second half, make another. The two are added in ordinary float32.
//
// Where the caller allows TF32 (11 bits), Hopper's kernels use two terms, high + middle: 16 bits, three products.
#pragma once

#include "cuda/common/instructions.cuh"
#include "cuda/common/split_bf16.h"

namespace anyflash::cuda {

inline constexpr int kSplitChain = 64;  ///< of one sum on the tensor cores
inline constexpr int kSmallProducts = 5;
inline constexpr int kThirdProducts = 3;  ///< the first product that two terms need
inline constexpr int kHighChunks = 2;     ///< the first 16 of the 64 whose high products follow the small ones

/// The index of the first small product for a number of bfloat16 terms.
__host__ __device__ constexpr int first_small(int bf16_terms) { return bf16_terms == kBf16Terms ? 0 : kThirdProducts; }

/// Which bfloat16 terms the small products multiply, in the order in which they are added: forward and backward need
/// the same scores to the bit. first: of a query's number (q, dout, P), second: of a key's.
__host__ __device__ constexpr int first_term(int n) { return n == 0 || n == 4 ? 1 : n == 2 ? 2 : 0; }
__host__ __device__ constexpr int second_term(int n) { return n == 0 || n == 3 ? 1 : n == 1 ? 2 : 0; }

/// Splits two numbers. Near the end of its range the high term stays finite; the terms of an infinity are not all
/// finite. to(n): where the nth goes.
template <int bf16_terms, class Place>
__device__ __forceinline__ void split(float a, float b, Place to) {
  to(0) = clamped_pair(a, b, __nv_bfloat16());
#pragma unroll
  for (int n = 1; n < bf16_terms; ++n) {
    a -= __uint_as_float(to(n - 1) << 16), b -= __uint_as_float(to(n - 1) & 0xffff0000u);
    to(n) = packed_pair(a, b, __nv_bfloat16());
  }
}

}  // namespace anyflash::cuda
