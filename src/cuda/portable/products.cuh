// The two products of a tile, S = Q K^T and O += P V, in the instructions that suit an element type. Q, K and V are
// tiles in shared memory; S, P and O are a warp's registers: x[i][j][e] is column 8j + 2 (lane % 4) + e of row
// row_of(i), in all of them. What a policy says:
//   Number                    what S, P and O are in
//   KeyTile, ValueTile        where an element of a tile lies: at(row, column)
//   alignment                 of tiles, in bytes
//   swaps                     whether kSwapped makes a difference
//   exact_infinities          false if an infinity among the operands may come out as NaN (the kernel then mends it)
//   row_of<kSlots>(i)         the row that slot i of a lane is
//   show()                    called by every thread between its copies to shared memory and the barrier
//   scores<kRows, kDepth, kSwapped>(s, q, k)   s = Q K^T, Q having kRows rows; kSwapped: `q` are keys and `k` queries,
//                             and s comes out as its transpose would, to the bit
//   values<Tile>(o, p, v)     o += P V, V being such a tile
// Both may make NaN of finite numbers, unless they are told, last, that the pass is one with care.
#pragma once

#include "cuda/common/instructions.cuh"
#include "cuda/common/pieces.cuh"

namespace anyflash::cuda {

template <class T, int kSlots, int kTiles>
__device__ __forceinline__ void clear(T (&x)[kSlots][kTiles][2]) {
#pragma unroll
  for (int i = 0; i < kSlots; ++i)
#pragma unroll
    for (int j = 0; j < kTiles; ++j) x[i][j][0] = x[i][j][1] = 0;
}
template <class T, int kSlots, int kTiles>
__device__ __forceinline__ void copy(T (&to)[kSlots][kTiles][2], const T (&x)[kSlots][kTiles][2]) {
#pragma unroll
  for (int i = 0; i < kSlots; ++i)
#pragma unroll
    for (int j = 0; j < kTiles; ++j) to[i][j][0] = x[i][j][0], to[i][j][1] = x[i][j][1];
}
template <class T, int kSlots, int kTiles>
__device__ __forceinline__ void add(T (&to)[kSlots][kTiles][2], const T (&x)[kSlots][kTiles][2]) {
#pragma unroll
  for (int i = 0; i < kSlots; ++i)
#pragma unroll
    for (int j = 0; j < kTiles; ++j) to[i][j][0] += x[i][j][0], to[i][j][1] += x[i][j][1];
}

/// The next slot becomes the first one. So loops over slots need not be unrolled, though registers have no index.
template <class T, int kSlots, int kTiles>
__device__ __forceinline__ void rotate_slots(T (&x)[kSlots][kTiles][2]) {
#pragma unroll
  for (int n = 0; n < 2 * kTiles; ++n) {
    const T first = x[0][n / 2][n % 2];
#pragma unroll
    for (int i = 1; i < kSlots; ++i) x[i - 1][n / 2][n % 2] = x[i][n / 2][n % 2];
    x[kSlots - 1][n / 2][n % 2] = first;
  }
}

/// A tile in shared memory of rows one behind the other, `pad` bytes between them so that the loads of a fragment
/// spread over all banks.
template <class E, int kRows, int kWidth, int pad>
struct PaddedTile {
  static constexpr int kStride = kWidth + pad / sizeof(E), kSize = kRows * kStride, kPeriod = 1, kRowStep = kStride;
  __device__ __forceinline__ static unsigned at(unsigned row, unsigned column) { return row * kStride + column; }
};

/// What the policies of one warp have in common: a warp's rows are neighbours.
template <class E, int key_pad, int value_pad>
struct WarpProducts {
  static constexpr int alignment = 16;
  template <int kRows, int kWidth>
  using KeyTile = PaddedTile<E, kRows, kWidth, key_pad>;
  template <int kRows, int kWidth>
  using ValueTile = PaddedTile<E, kRows, kWidth, value_pad>;

  template <int kSlots>
  __device__ __forceinline__ static int row_of(int slot) {
    return threadIdx.x / 32 * (8 * kSlots) + 8 * slot + threadIdx.x % 32 / 4;
  }
  __device__ __forceinline__ static void show() {}
};

/// float16 and bfloat16 on mma.m16n8k16 (two m16n8k8 on sm_75), sums in float32.
template <class E>
struct HalfProducts : WarpProducts<E, 16, 16> {
  using Number = float;
  static constexpr bool exact_infinities = true, swaps = false;
  /// Channels of one sum: 8 steps of the tensor cores, which cut off where float32 rounds. Longer ones sum up such.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  static constexpr int chain = 64;
#else
  static constexpr int chain = 128;
#endif

  template <int kRows, int kDepth, bool kSwapped = false, int kSlots, int kTiles>
  __device__ __forceinline__ static void scores(float (&s)[kSlots][kTiles][2], const E* q, const E* k, bool = false) {
    constexpr int q_stride = WarpProducts<E, 16, 16>::template KeyTile<kRows, kDepth>::kStride, k_stride = q_stride;
    q += threadIdx.x / 32 * (8 * kSlots) * q_stride;
    static_assert(kSlots % 2 == 0 && kTiles % 2 == 0 && kDepth % 16 == 0 && (kDepth < chain || kDepth % chain == 0));
    const unsigned lane = lane_number();
    q += lane % 16 * q_stride + lane / 16 * 8;
    k += (lane % 8 + lane / 16 * 8) * k_stride + lane / 8 % 2 * 8;
    clear(s);
    add_products < kDepth<chain ? kDepth : chain>(s, q, q_stride, k, k_stride);
#pragma unroll
    for (int c = chain; c < kDepth; c += chain) {
      float rest[kSlots][kTiles][2];
      clear(rest);
      add_products<chain>(rest, q + c, q_stride, k + c, k_stride);
      add(s, rest);
    }
  }

  template <class Tile, int kSlots, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void values(float (&o)[kSlots][kTiles][2], const float (&p)[kSlots][kKeyTiles][2],
                                                const E* v, bool = false) {
    constexpr int v_stride = Tile::kStride;
    static_assert(kSlots % 2 == 0 && kKeyTiles % 2 == 0 && kTiles % 2 == 0);
    const unsigned lane = lane_number();
    v += lane % 16 * v_stride + lane / 16 * 8;
    std::uint32_t a[kSlots / 2][4], b[3][4];
    constexpr int kSteps = kKeyTiles / 2 * (kTiles / 2);
    const auto load_b = [&](int step) {
      load_matrices_transposed(b[step % 3], v + 16 * (step / (kTiles / 2)) * v_stride + 16 * (step % (kTiles / 2)));
    };
    load_b(0);
    load_b(1);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int key = step / (kTiles / 2) * 2, j = step % (kTiles / 2) * 2;
      if (step + 2 < kSteps) load_b(step + 2);
      if (j == 0) {
#pragma unroll
        for (int i = 0; i < kSlots / 2; ++i)
#pragma unroll
          for (int n = 0; n < 4; ++n) a[i][n] = packed(p[2 * i + n % 2][key + n / 2]);
      }
#pragma unroll
      for (int i = 0; i < kSlots / 2; ++i) {
        multiply_16(o[2 * i][j], o[2 * i + 1][j], a[i], b[step % 3][0], b[step % 3][1], E());
        multiply_16(o[2 * i][j + 1], o[2 * i + 1][j + 1], a[i], b[step % 3][2], b[step % 3][3], E());
      }
    }
  }

 private:
  /// s += the products over kDepth channels; q and k: this lane's rows. Fragments are loaded two steps before they are
  /// used: a load takes longer than the products of one.
  template <int kDepth, int kSlots, int kTiles>
  __device__ __forceinline__ static void add_products(float (&s)[kSlots][kTiles][2], const E* q, int q_stride,
                                                      const E* k, int k_stride) {
    std::uint32_t a[2][kSlots / 2][4], b[3][4];
    const auto load_a = [&](int c) {
#pragma unroll
      for (int i = 0; i < kSlots / 2; ++i) load_matrices(a[c / 16 % 2][i], q + 16 * i * q_stride + c);
    };
    constexpr int kSteps = kDepth / 16 * (kTiles / 2);
    const auto load_b = [&](int step) {
      load_matrices(b[step % 3], k + 16 * (step % (kTiles / 2)) * k_stride + step / (kTiles / 2) * 16);
    };
    load_a(0);
    load_b(0);
    load_b(1);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int c = step / (kTiles / 2) * 16, j = step % (kTiles / 2) * 2;
      if (j == 0 && c + 16 < kDepth) load_a(c + 16);
      if (step + 2 < kSteps) load_b(step + 2);
#pragma unroll
      for (int i = 0; i < kSlots / 2; ++i) {
        multiply_16(s[2 * i][j], s[2 * i + 1][j], a[c / 16 % 2][i], b[step % 3][0], b[step % 3][1], E());
        multiply_16(s[2 * i][j + 1], s[2 * i + 1][j + 1], a[c / 16 % 2][i], b[step % 3][2], b[step % 3][3], E());
      }
    }
  }

  __device__ __forceinline__ static std::uint32_t packed(const float (&x)[2]) {
    return packed_pair(x[0], x[1], E());
  }
};

#if __CUDA_ARCH__ >= 800 || !defined(__CUDA_ARCH__)

/// float32 on the tensor cores, in pieces of bfloat16 (pieces.cuh). Numbers are made 2^16 times as large, so that the
/// smallest ones have their pieces too. Where that is too much, the result is NaN; with care they stay as they are.
struct PieceProducts : WarpProducts<float, 16, 16> {
  using Number = float;
  static constexpr bool exact_infinities = false, swaps = true;

  template <int kRows, int kDepth, bool kSwapped = false, int kSlots, int kTiles>
  __device__ __forceinline__ static void scores(float (&s)[kSlots][kTiles][2], const float* q, const float* k,
                                                bool careful = false) {
    constexpr int stride = WarpProducts<float, 16, 16>::template KeyTile<kRows, kDepth>::kStride;
    static_assert(kSlots % 2 == 0 && kDepth % kPieceTerms == 0);
    const unsigned lane = lane_number();
    // Column 2t of A's first 8 is channel t, column 2t + 1 channel t + 4: loads of 8 x 8 matrices of 16 bits bring them
    // so. It does not matter to a sum over 16.
    q += (threadIdx.x / 32 * (8 * kSlots) + lane % 16) * stride + lane / 16 * 4;
    k += lane % 8 * stride + lane / 8 * 4;
    clear(s);
    const float size = careful ? 1.0f : kPieceScale;
    const float inverse = careful ? 1.0f : 1.0f / (kPieceScale * kPieceScale);
#pragma unroll 1
    for (int c = 0; c < kDepth; c += kPieceTerms)
#pragma unroll
      for (int i = 0; i < kSlots / 2; ++i)
        add_chain<kSwapped, stride>(s[2 * i], s[2 * i + 1], q + 16 * i * stride + c, k + c, size,
                                     inverse);
  }

  template <class Tile, int kSlots, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void values(float (&o)[kSlots][kTiles][2], const float (&p)[kSlots][kKeyTiles][2],
                                                const float* v, bool careful = false) {
    constexpr int v_stride = Tile::kStride;
    static_assert(kSlots % 2 == 0 && kKeyTiles % 2 == 0 && 8 * kKeyTiles <= kPieceTerms);
    const unsigned lane = lane_number();
    v += 2 * (lane % 4) * v_stride + lane / 4;
    // With care the sums are what they are, but small weights keep their pieces beside large values.
    const float weight_size = careful ? 256.0f : kPieceScale, size = careful ? 1.0f / 256.0f : kPieceScale;
    const float inverse = careful ? 1.0f : 1.0f / (kPieceScale * kPieceScale);
#pragma unroll
    for (int i = 0; i < kSlots / 2; ++i) {
      Operand a[kKeyTiles / 2];
#pragma unroll
      for (int m = 0; m < kKeyTiles / 2; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float(&x)[2] = p[2 * i + n % 2][2 * m + n / 2];
          split(x[0], x[1], a[m], n, weight_size);
        }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        Sums sums;
        std::uint32_t late[kChunks][2];
#pragma unroll
        for (int m = 0; m < kKeyTiles / 2; ++m) {
          Operand b;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const float* const at = v + (16 * m + 8 * n) * v_stride + 8 * j;
            split(at[0], at[v_stride], b, n, size);
          }
          multiply<false>(sums, a[m], b, m, late[m]);
        }
#pragma unroll
        for (int m = kLateChunk; m < kKeyTiles / 2; ++m) sums.add_late(a[m].pieces[0], late[m]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = o[2 * i + e / 2][j][e % 2];
          x = fmaf(sums.sum(e), inverse, x);
        }
      }
    }
  }

 private:
  static constexpr int kChunks = kPieceTerms / 16;

  struct Operand {
    std::uint32_t pieces[kPieces][4];  // of B the first two
  };
  struct Sums {
    float high[2][2] = {}, small[2][2] = {};
    __device__ __forceinline__ void add_late(const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
      multiply_16(small[0], small[1], a, b[0], b[1], __nv_bfloat16());
    }
    __device__ __forceinline__ float sum(int e) const { return high[e / 2][e % 2] + small[e / 2][e % 2]; }
    /// An infinite sum becomes NaN: it may be one for its size alone.
    __device__ __forceinline__ void add_to(float (&c01)[2], float (&c23)[2], float inverse) const {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = e < 2 ? c01[e] : c23[e - 2];
        x += fmaf(sum(e), 0.0f, sum(e) * inverse);
      }
    }
  };

  __device__ __forceinline__ static void split(float x, float y, Operand& to, int n, float size) {
    cuda::split<kPieces>(x * size, y * size, [&](int piece) -> std::uint32_t& { return to.pieces[piece][n]; });
  }

  /// s += the products over 64 channels, of 16 rows; q, k: this lane's.
  template <bool kSwapped, int kStride, int kTiles>
  __device__ __forceinline__ static void add_chain(float (&s01)[kTiles][2], float (&s23)[kTiles][2], const float* q,
                                                   const float* k, float size, float inverse) {
    if constexpr (kTiles > 4) {  // the rows' pieces are made once
      Operand a[kChunks];
#pragma unroll
      for (int m = 0; m < kChunks; ++m) a[m] = row_pieces(q + 16 * m, size);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        Sums sums;
        std::uint32_t late[kChunks][2];
#pragma unroll
        for (int m = 0; m < kChunks; ++m)
          multiply<kSwapped>(sums, a[m], column_pieces(k + 8 * j * kStride + 16 * m, size), m, late[m]);
#pragma unroll
        for (int m = kLateChunk; m < kChunks; ++m) sums.add_late(a[m].pieces[0], late[m]);
        sums.add_to(s01[j], s23[j], inverse);
      }
    } else {  // for two tiles at a time: there are no registers for all of them
      static_assert(kTiles % 2 == 0);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        Sums sums[2];
        std::uint32_t rows[kChunks][4], late[2][kChunks][2];
#pragma unroll
        for (int m = 0; m < kChunks; ++m) {
          const Operand a = row_pieces(q + 16 * m, size);
#pragma unroll
          for (int n = 0; n < 4; ++n) rows[m][n] = a.pieces[0][n];
#pragma unroll
          for (int n = 0; n < 2; ++n)
            multiply<kSwapped>(sums[n], a, column_pieces(k + 8 * (j + n) * kStride + 16 * m, size), m, late[n][m]);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int m = kLateChunk; m < kChunks; ++m) sums[n].add_late(rows[m], late[n][m]);
          sums[n].add_to(s01[j + n], s23[j + n], inverse);
        }
      }
    }
  }
  __device__ __forceinline__ static Operand row_pieces(const float* q, float size) {
    Operand to;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t x[4];
      load_matrices(x, q + 8 * half);
      split(__uint_as_float(x[0]), __uint_as_float(x[2]), to, 2 * half, size);
      split(__uint_as_float(x[1]), __uint_as_float(x[3]), to, 2 * half + 1, size);
    }
    return to;
  }
  __device__ __forceinline__ static Operand column_pieces(const float* k, float size) {
    std::uint32_t x[4];
    load_matrices(x, k);
    Operand to;
    split(__uint_as_float(x[0]), __uint_as_float(x[1]), to, 0, size);
    split(__uint_as_float(x[2]), __uint_as_float(x[3]), to, 1, size);
    return to;
  }

  /// a: of queries; if swapped, of keys. m: of 16 terms, which. late: the high pieces of b, for later.
  template <bool kSwapped>
  __device__ __forceinline__ static void multiply(Sums& sums, const Operand& a, const Operand& b, int m,
                                                  std::uint32_t (&late)[2]) {
#pragma unroll
    for (int n = 0; n < kSmallProducts; ++n) {
      const auto& x = a.pieces[kSwapped ? second_piece(n) : first_piece(n)];
      const auto& y = b.pieces[kSwapped ? first_piece(n) : second_piece(n)];
      multiply_16(sums.small[0], sums.small[1], x, y[0], y[1], __nv_bfloat16());
    }
    late[0] = b.pieces[0][0], late[1] = b.pieces[0][1];
    if (m < kLateChunk)
      multiply_16(sums.high[0], sums.high[1], a.pieces[0], late[0], late[1], __nv_bfloat16());
  }
};

/// float32 as TF32, 11 bits, on mma.m16n8k8. The largest numbers are rounded to an infinity; hence infinite scores
/// become NaN. With care those numbers are cut off, and scores stay what they are.
struct Tf32Products : WarpProducts<float, 16, 16> {
  using Number = float;
  static constexpr bool exact_infinities = true, swaps = false;

  template <int kRows, int kDepth, bool kSwapped = false, int kSlots, int kTiles>
  __device__ __forceinline__ static void scores(float (&s)[kSlots][kTiles][2], const float* q, const float* k,
                                                bool careful = false) {
    constexpr int stride = WarpProducts<float, 16, 16>::template KeyTile<kRows, kDepth>::kStride;
    static_assert(kSlots % 2 == 0 && kDepth % 16 == 0);
    const unsigned lane = lane_number();
    q += (threadIdx.x / 32 * (8 * kSlots) + lane % 16) * stride + lane / 16 * 4;
    k += lane % 8 * stride + lane / 8 * 4;
    clear(s);
#pragma unroll 2
    for (int c = 0; c < kDepth; c += 16) {
      std::uint32_t a[kSlots / 2][2][4];
#pragma unroll
      for (int i = 0; i < kSlots / 2; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) load(a[i][half], q + 16 * i * stride + c + 8 * half, careful);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        std::uint32_t b[4];
        load(b, k + 8 * j * stride + c, careful);
#pragma unroll
        for (int i = 0; i < kSlots / 2; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            multiply_8(s[2 * i][j], s[2 * i + 1][j], a[i][half], b[2 * half], b[2 * half + 1]);
      }
    }
    if (careful) return;
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n) s[i][n / 2][n % 2] = fmaf(s[i][n / 2][n % 2], 0.0f, s[i][n / 2][n % 2]);
  }

  /// Of 8 keys, the first four columns of P are the even ones: so a lane has them.
  template <class Tile, int kSlots, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void values(float (&o)[kSlots][kTiles][2], const float (&p)[kSlots][kKeyTiles][2],
                                                const float* v, bool careful = false) {
    const unsigned lane = lane_number();
    v += 2 * (lane % 4) * Tile::kStride + lane / 4;
#pragma unroll
    for (int m = 0; m < kKeyTiles; ++m) {
      std::uint32_t a[kSlots / 2][4];
#pragma unroll
      for (int i = 0; i < kSlots / 2; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n) a[i][n] = rounded(p[2 * i + n % 2][m][n / 2], careful);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const float* const at = v + 8 * m * Tile::kStride + 8 * j;
        const auto b0 = rounded(at[0], careful), b1 = rounded(at[Tile::kStride], careful);
#pragma unroll
        for (int i = 0; i < kSlots / 2; ++i) multiply_8(o[2 * i][j], o[2 * i + 1][j], a[i], b0, b1);
      }
    }
  }

 private:
  __device__ __forceinline__ static std::uint32_t rounded(float x, bool careful) {
    const auto nearest = to_tf32(x);
    return careful && (nearest & 0x7fffffff) == 0x7f800000 ? __float_as_uint(x) : nearest;
  }
  /// Four 8 x 4 matrices.
  __device__ __forceinline__ static void load(std::uint32_t (&to)[4], const float* from, bool careful) {
    load_matrices(to, from);
#pragma unroll
    for (int n = 0; n < 4; ++n) to[n] = rounded(__uint_as_float(to[n]), careful);
  }
};

/// float64 on mma.m8n8k4; on Hopper, where slots come in pairs, on mma.m16n8k16.
struct DoubleProducts : WarpProducts<double, 32, 16> {
  using Number = double;
  static constexpr bool exact_infinities = true, swaps = false;

  template <int kRows, int kDepth, bool kSwapped = false, int kSlots, int kTiles>
  __device__ __forceinline__ static void scores(double (&s)[kSlots][kTiles][2], const double* q, const double* k,
                                                bool = false) {
    constexpr int q_stride = WarpProducts<double, 32, 16>::template KeyTile<kRows, kDepth>::kStride,
                  k_stride = q_stride;
    q += threadIdx.x / 32 * (8 * kSlots) * q_stride;
    const unsigned lane = lane_number();
    q += lane / 4 * q_stride + lane % 4;
    k += lane / 4 * k_stride + lane % 4;
    clear(s);
    if constexpr (wide && kSlots % 2 == 0) {
#pragma unroll 2
      for (int c = 0; c < kDepth; c += 16) {
        double a[kSlots / 2][8];
#pragma unroll
        for (int i = 0; i < kSlots / 2; ++i)
#pragma unroll
          for (int n = 0; n < 8; ++n) a[i][n] = q[(16 * i + n % 2 * 8) * q_stride + c + n / 2 * 4];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          double b[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) b[n] = k[8 * j * k_stride + c + 4 * n];
#pragma unroll
          for (int i = 0; i < kSlots / 2; ++i) multiply_64(s[2 * i][j], s[2 * i + 1][j], a[i], b);
        }
      }
    } else {
#pragma unroll 4
      for (int c = 0; c < kDepth; c += 4) {
        double a[kSlots];
#pragma unroll
        for (int i = 0; i < kSlots; ++i) a[i] = q[8 * i * q_stride + c];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const double b = k[8 * j * k_stride + c];
#pragma unroll
          for (int i = 0; i < kSlots; ++i) multiply_64(s[i][j], a[i], b);
        }
      }
    }
  }

  template <class Tile, int kSlots, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void values(double (&o)[kSlots][kTiles][2], const double (&p)[kSlots][kKeyTiles][2],
                                                const double* v, bool = false) {
    constexpr int v_stride = Tile::kStride;
    const unsigned lane = lane_number();
    v += 2 * (lane % 4) * v_stride + lane / 4;  // column 4n + t of A is key 2t + n % 2 of tile n / 2
    if constexpr (wide && kSlots % 2 == 0 && kKeyTiles % 2 == 0) {
#pragma unroll
      for (int key = 0; key < kKeyTiles; key += 2)
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          double b[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) b[n] = v[(8 * (key + n / 2) + n % 2) * v_stride + 8 * j];
#pragma unroll
          for (int i = 0; i < kSlots / 2; ++i) {
            double a[8];
#pragma unroll
            for (int n = 0; n < 8; ++n) a[n] = p[2 * i + n % 2][key + n / 4][n / 2 % 2];
            multiply_64(o[2 * i][j], o[2 * i + 1][j], a, b);
          }
        }
    } else {
#pragma unroll
      for (int key = 0; key < kKeyTiles; ++key)
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            const double b = v[(8 * key + e) * v_stride + 8 * j];
#pragma unroll
            for (int i = 0; i < kSlots; ++i) multiply_64(o[i][j], p[i][key][e], b);
          }
    }
  }

 private:
#if __CUDA_ARCH__ >= 900
  static constexpr bool wide = true;
#else
  static constexpr bool wide = false;
#endif
};

#endif

/// Any type on the ordinary multipliers, where a GPU has no tensor cores for it.
template <class E, class T>
struct PlainProducts : WarpProducts<E, sizeof(E) == 8 ? 32 : 16, 16> {
  using Number = T;
  static constexpr bool exact_infinities = true, swaps = false;

  template <int kRows, int kDepth, bool kSwapped = false, int kSlots, int kTiles>
  __device__ __forceinline__ static void scores(T (&s)[kSlots][kTiles][2], const E* q, const E* k, bool = false) {
    constexpr int q_stride = WarpProducts < E, sizeof(E) == 8 ? 32 : 16,
                  16 > ::template KeyTile<kRows, kDepth>::kStride, k_stride = q_stride;
    q += threadIdx.x / 32 * (8 * kSlots) * q_stride;
    const unsigned lane = lane_number();
    q += lane / 4 * q_stride;
    k += 2 * (lane % 4) * k_stride;
    clear(s);
#pragma unroll 2
    for (int c = 0; c < kDepth; ++c) {
      T a[kSlots];
#pragma unroll
      for (int i = 0; i < kSlots; ++i) a[i] = static_cast<T>(q[8 * i * q_stride + c]);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const T b = static_cast<T>(k[(8 * j + e) * k_stride + c]);
#pragma unroll
          for (int i = 0; i < kSlots; ++i) s[i][j][e] += a[i] * b;
        }
    }
  }

  /// The sums of a tile by themselves first: one chain over all keys loses more than tensor cores do.
  template <class Tile, int kSlots, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void values(T (&o)[kSlots][kTiles][2], const T (&p)[kSlots][kKeyTiles][2],
                                                const E* v, bool = false) {
    constexpr int kPart = kTiles < 8 ? kTiles : 8;
    static_assert(kTiles % kPart == 0);
#pragma unroll
    for (int j = 0; j < kTiles; j += kPart) {
      T sum[kSlots][kPart][2];
      clear(sum);
      add_values<Tile>(sum, p, v + 8 * j);
#pragma unroll
      for (int i = 0; i < kSlots; ++i)
#pragma unroll
        for (int n = 0; n < 2 * kPart; ++n) o[i][j + n / 2][n % 2] += sum[i][n / 2][n % 2];
    }
  }

 private:
  template <class Tile, int kSlots, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void add_values(T (&o)[kSlots][kTiles][2], const T (&p)[kSlots][kKeyTiles][2],
                                                    const E* v) {
    constexpr int v_stride = Tile::kStride;
    const unsigned lane = lane_number();
    v += 2 * (lane % 4);
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll 1
        for (int t = 0; t < 4; ++t) {
          T a[kSlots];
#pragma unroll
          for (int i = 0; i < kSlots; ++i) a[i] = __shfl_sync(0xffffffffu, p[i][tile][e], (lane & ~3u) | t);
          const E* const row = v + (8 * tile + 2 * t + e) * v_stride;
#pragma unroll
          for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const T b = static_cast<T>(row[8 * j + n]);
#pragma unroll
              for (int i = 0; i < kSlots; ++i) o[i][j][n] += a[i] * b;
            }
        }
  }
};

/// The policy of an element type on the GPU that is compiled for. tf32: float32 may be that.
template <class E, bool tf32 = false>
struct ProductsOf;
template <>
struct ProductsOf<__half> {
  using type = HalfProducts<__half>;
};
#if __CUDA_ARCH__ >= 800 || !defined(__CUDA_ARCH__)
template <>
struct ProductsOf<__nv_bfloat16> {
  using type = HalfProducts<__nv_bfloat16>;
};
template <>
struct ProductsOf<float> {
  using type = PieceProducts;
};
template <>
struct ProductsOf<float, true> {
  using type = Tf32Products;
};
template <>
struct ProductsOf<double> {
  using type = DoubleProducts;
};
#else
template <>
struct ProductsOf<__nv_bfloat16> {
  using type = PlainProducts<__nv_bfloat16, float>;
};
template <>
struct ProductsOf<float> {
  using type = PlainProducts<float, float>;
};
template <>
struct ProductsOf<float, true> : ProductsOf<float> {};
template <>
struct ProductsOf<double> {
  using type = PlainProducts<double, double>;
};
#endif

}  // namespace anyflash::cuda
