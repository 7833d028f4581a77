// float32 numbers as sums of three bfloat16, high + middle + low: 24 bits, the number to the bit from 2^-110 up.
// A product of two numbers is then made of six products of pieces on the tensor cores; the three others are below
// 2^-26 of it. (Henry, Tang and Heinecke 2019.) The tensor cores cut off where float32 rounds, and would so take from
// a long sum at each step. Products of high pieces have 16 bits, so a sum of a few of them is all but exact. Of 64
// terms, the high products of the first half are one sum; the small ones, and then those of the second half, another;
// both are joined in the ordinary adders.
//
// Where the caller allows TF32 (11 bits), Hopper's kernels make do with two pieces, high + middle: 16 bits, three
// products.
#pragma once

#include "cuda/common/instructions.cuh"
#include "cuda/common/pieces.h"

namespace anyflash::cuda {

inline constexpr int kPieceTerms = 64;  ///< of a sum on the tensor cores
inline constexpr int kSmallProducts = 5;
inline constexpr int kThirdProducts = 3;  ///< the first of them, which two pieces do without
inline constexpr int kLateChunk = 2;      ///< the first 16 terms whose high products come behind the small ones

/// The first of the small products of so many pieces.
__host__ __device__ constexpr int first_small(int pieces) { return pieces == kPieces ? 0 : kThirdProducts; }

/// Which pieces the small products multiply, in the order in which they are added: forward and backward need the same
/// scores to the bit. first: of a query's number (q, dout, P), second: of a key's.
__host__ __device__ constexpr int first_piece(int n) { return n == 0 || n == 4 ? 1 : n == 2 ? 2 : 0; }
__host__ __device__ constexpr int second_piece(int n) { return n == 0 || n == 3 ? 1 : n == 1 ? 2 : 0; }

/// The pieces of two numbers. Near the end of its range the high piece stays finite; those of an infinity are not all
/// finite. to(n): where the nth goes.
template <int pieces, class Place>
__device__ __forceinline__ void split(float a, float b, Place to) {
  to(0) = clamped_pair(a, b, __nv_bfloat16());
#pragma unroll
  for (int n = 1; n < pieces; ++n) {
    a -= __uint_as_float(to(n - 1) << 16), b -= __uint_as_float(to(n - 1) & 0xffff0000u);
    to(n) = packed_pair(a, b, __nv_bfloat16());
  }
}

}  // namespace anyflash::cuda
