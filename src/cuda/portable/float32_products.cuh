// The product policies of float32 on the tensor cores of GPUs from sm_80 up (products.cuh describes policies).
#pragma once

#include "cuda/common/split_bf16.cuh"
#include "cuda/portable/warp_products.cuh"

#if __CUDA_ARCH__ >= 800 || !defined(__CUDA_ARCH__)

namespace anyflash::cuda {

/// float32 on the tensor cores by split bfloat16 (split_bf16.cuh). Numbers are scaled by 2^16, so that the smallest ones
/// can be split too. If that overflows, the result is NaN, and the non-finite fallback corrects it (not_finite.cuh).
struct SplitProducts : WarpProducts<float, 16, 16> {
  using Number = float;
  static constexpr bool exact_infinities = false, swaps = true;

  template <int kRows, int kDepth, bool kSwapped = false, int kRowGroups, int kTiles>
  __device__ __forceinline__ static void scores(float (&s)[kRowGroups][kTiles][2], const float* q, const float* k,
                                                bool = false) {
    constexpr int stride = WarpProducts<float, 16, 16>::template KeyTile<kRows, kDepth>::kStride;
    static_assert(kRowGroups % 2 == 0 && kDepth % kSplitChain == 0);
    const unsigned lane = lane_number();
    // Column 2t of A's first 8 is channel t, column 2t + 1 is channel t + 4, because loads of 8 x 8 matrices of 16 bits
    // deliver them so. The order does not matter to a sum over 16.
    q += (threadIdx.x / 32 * (8 * kRowGroups) + lane % 16) * stride + lane / 16 * 4;
    k += lane % 8 * stride + lane / 8 * 4;
    clear(s);
#pragma unroll 1
    for (int c = 0; c < kDepth; c += kSplitChain)
#pragma unroll
      for (int i = 0; i < kRowGroups / 2; ++i)
        add_chain<kSwapped, stride>(s[2 * i], s[2 * i + 1], q + 16 * i * stride + c, k + c);
  }

  template <class Tile, int kRowGroups, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void values(float (&o)[kRowGroups][kTiles][2],
                                                const float (&p)[kRowGroups][kKeyTiles][2], const float* v,
                                                bool = false) {
    constexpr int v_stride = Tile::kStride;
    static_assert(kRowGroups % 2 == 0 && kKeyTiles % 2 == 0 && 8 * kKeyTiles <= kSplitChain);
    const unsigned lane = lane_number();
    v += 2 * (lane % 4) * v_stride + lane / 4;
#pragma unroll
    for (int i = 0; i < kRowGroups / 2; ++i) {
      Operand a[kKeyTiles / 2];
#pragma unroll
      for (int m = 0; m < kKeyTiles / 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float (&x)[2] = p[2 * i + n % 2][2 * m + n / 2];
          split(x[0], x[1], a[m], n);
        }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        Sums sums;
        std::uint32_t high_b[kChunks][2];
#pragma unroll
        for (int m = 0; m < kKeyTiles / 2; ++m) {
          Operand b;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const float* const at = v + (16 * m + 8 * n) * v_stride + 8 * j;
            split(at[0], at[v_stride], b, n);
          }
          multiply<false>(sums, a[m], b, m, high_b[m]);
        }
#pragma unroll
        for (int m = kHighChunks; m < kKeyTiles / 2; ++m) sums.add_high(a[m].bf16_terms[0], high_b[m]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = o[2 * i + e / 2][j][e % 2];
          x = fmaf(sums.sum(e), kInverse, x);
        }
      }
    }
  }

 private:
  static constexpr int kChunks = kSplitChain / 16;
  static constexpr float kInverse = 1.0f / (kSplitScale * kSplitScale);

  struct Operand {
    std::uint32_t bf16_terms[kBf16Terms][4];  // the first two of B's
  };
  struct Sums {
    float high[2][2] = {}, small[2][2] = {};
    __device__ __forceinline__ void add_high(const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
      multiply_16(small[0], small[1], a, b[0], b[1], __nv_bfloat16());
    }
    __device__ __forceinline__ float sum(int e) const { return high[e / 2][e % 2] + small[e / 2][e % 2]; }
    /// An infinite sum becomes NaN, because it may have overflowed only through the scaling.
    __device__ __forceinline__ void add_to(float (&c01)[2], float (&c23)[2]) const {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = e < 2 ? c01[e] : c23[e - 2];
        x += fmaf(sum(e), 0.0f, sum(e) * kInverse);
      }
    }
  };

  __device__ __forceinline__ static void split(float x, float y, Operand& to, int n) {
    const auto place = [&](int term) -> std::uint32_t& { return to.bf16_terms[term][n]; };
    cuda::split<kBf16Terms>(x * kSplitScale, y * kSplitScale, place);
  }

  /// s += the products over 64 channels, of 16 rows; q, k: this lane's rows.
  template <bool kSwapped, int kStride, int kTiles>
  __device__ __forceinline__ static void add_chain(float (&s01)[kTiles][2], float (&s23)[kTiles][2], const float* q,
                                                   const float* k) {
    if constexpr (kTiles > 4) {  // the rows are split only once
      Operand a[kChunks];
#pragma unroll
      for (int m = 0; m < kChunks; ++m) a[m] = row_terms(q + 16 * m);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        Sums sums;
        std::uint32_t high_b[kChunks][2];
#pragma unroll
        for (int m = 0; m < kChunks; ++m)
          multiply<kSwapped>(sums, a[m], column_terms(k + 8 * j * kStride + 16 * m), m, high_b[m]);
#pragma unroll
        for (int m = kHighChunks; m < kChunks; ++m) sums.add_high(a[m].bf16_terms[0], high_b[m]);
        sums.add_to(s01[j], s23[j]);
      }
    } else {  // two tiles at a time: there are no registers for all of them
      static_assert(kTiles % 2 == 0);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        Sums sums[2];
        std::uint32_t rows[kChunks][4], high_b[2][kChunks][2];
#pragma unroll
        for (int m = 0; m < kChunks; ++m) {
          const Operand a = row_terms(q + 16 * m);
#pragma unroll
          for (int n = 0; n < 4; ++n) rows[m][n] = a.bf16_terms[0][n];
#pragma unroll
          for (int n = 0; n < 2; ++n)
            multiply<kSwapped>(sums[n], a, column_terms(k + 8 * (j + n) * kStride + 16 * m), m, high_b[n][m]);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int m = kHighChunks; m < kChunks; ++m) sums[n].add_high(rows[m], high_b[n][m]);
          sums[n].add_to(s01[j + n], s23[j + n]);
        }
      }
    }
  }
  __device__ __forceinline__ static Operand row_terms(const float* q) {
    Operand to;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t x[4];
      load_matrices(x, q + 8 * half);
      split(__uint_as_float(x[0]), __uint_as_float(x[2]), to, 2 * half);
      split(__uint_as_float(x[1]), __uint_as_float(x[3]), to, 2 * half + 1);
    }
    return to;
  }
  __device__ __forceinline__ static Operand column_terms(const float* k) {
    std::uint32_t x[4];
    load_matrices(x, k);
    Operand to;
    split(__uint_as_float(x[0]), __uint_as_float(x[1]), to, 0);
    split(__uint_as_float(x[2]), __uint_as_float(x[3]), to, 1);
    return to;
  }

  /// a: of queries; if swapped, of keys. m: the index of 16 terms. high_b: the high bfloat16 terms of b, whose products
  /// come later.
  template <bool kSwapped>
  __device__ __forceinline__ static void multiply(Sums& sums, const Operand& a, const Operand& b, int m,
                                                  std::uint32_t (&high_b)[2]) {
#pragma unroll
    for (int n = 0; n < kSmallProducts; ++n) {
      const auto& x = a.bf16_terms[kSwapped ? second_term(n) : first_term(n)];
      const auto& y = b.bf16_terms[kSwapped ? first_term(n) : second_term(n)];
      multiply_16(sums.small[0], sums.small[1], x, y[0], y[1], __nv_bfloat16());
    }
    high_b[0] = b.bf16_terms[0][0], high_b[1] = b.bf16_terms[0][1];
    if (m < kHighChunks)
      multiply_16(sums.high[0], sums.high[1], a.bf16_terms[0], high_b[0], high_b[1], __nv_bfloat16());
  }
};

/// float32 as TF32, 11 bits, on mma.m16n8k8. The largest numbers would round to infinity; hence infinite scores become
/// NaN. In the non-finite fallback those numbers are truncated, and scores are left as they are.
struct Tf32Products : WarpProducts<float, 16, 16> {
  using Number = float;
  static constexpr bool exact_infinities = true, swaps = false;

  template <int kRows, int kDepth, bool kSwapped = false, int kRowGroups, int kTiles>
  __device__ __forceinline__ static void scores(float (&s)[kRowGroups][kTiles][2], const float* q, const float* k,
                                                bool non_finite = false) {
    constexpr int stride = WarpProducts<float, 16, 16>::template KeyTile<kRows, kDepth>::kStride;
    static_assert(kRowGroups % 2 == 0 && kDepth % 16 == 0);
    const unsigned lane = lane_number();
    q += (threadIdx.x / 32 * (8 * kRowGroups) + lane % 16) * stride + lane / 16 * 4;
    k += lane % 8 * stride + lane / 8 * 4;
    clear(s);
#pragma unroll 2
    for (int c = 0; c < kDepth; c += 16) {
      std::uint32_t a[kRowGroups / 2][2][4];
#pragma unroll
      for (int i = 0; i < kRowGroups / 2; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) load(a[i][half], q + 16 * i * stride + c + 8 * half, non_finite);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        std::uint32_t b[4];
        load(b, k + 8 * j * stride + c, non_finite);
#pragma unroll
        for (int i = 0; i < kRowGroups / 2; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            multiply_8(s[2 * i][j], s[2 * i + 1][j], a[i][half], b[2 * half], b[2 * half + 1]);
      }
    }
    if (non_finite) return;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) s[i][n / 2][n % 2] = fmaf(s[i][n / 2][n % 2], 0.0f, s[i][n / 2][n % 2]);
  }

  /// The first four columns of P, of 8 keys, are the even keys: so a lane already has them.
  template <class Tile, int kRowGroups, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void values(float (&o)[kRowGroups][kTiles][2],
                                                const float (&p)[kRowGroups][kKeyTiles][2], const float* v,
                                                bool non_finite = false) {
    const unsigned lane = lane_number();
    v += 2 * (lane % 4) * Tile::kStride + lane / 4;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      std::uint32_t a[kRowGroups / 2][4];
#pragma unroll
      for (int i = 0; i < kRowGroups / 2; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n) a[i][n] = rounded(p[2 * i + n % 2][m][n / 2], non_finite);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const float* const at = v + 8 * m * Tile::kStride + 8 * j;
        const auto b0 = rounded(at[0], non_finite), b1 = rounded(at[Tile::kStride], non_finite);
#pragma unroll
        for (int i = 0; i < kRowGroups / 2; ++i) multiply_8(o[2 * i][j], o[2 * i + 1][j], a[i], b0, b1);
      }
    }
  }

 private:
  __device__ __forceinline__ static std::uint32_t rounded(float x, bool non_finite) {
    const auto nearest = to_tf32(x);
    return non_finite && (nearest & 0x7fffffff) == 0x7f800000 ? __float_as_uint(x) : nearest;
  }
  /// Four 8 x 4 matrices.
  __device__ __forceinline__ static void load(std::uint32_t (&to)[4], const float* from, bool non_finite) {
    load_matrices(to, from);
#pragma unroll
    for (int n = 0; n < 4; ++n) to[n] = rounded(__uint_as_float(to[n]), non_finite);
  }
};

}  // namespace anyflash::cuda

#endif
