// The two products of a tile, S = Q K^T and O += P V, in the instructions that suit an element type. Q, K and V are
// tiles in shared memory; S, P and O are in a warp's registers. In all of them x[i][j][e] is column 8j + 2 (lane % 4) +
// e of row row_of(i). A policy defines:
//   Number                    the type of S, P and O
//   KeyTile, ValueTile        the layout of a tile: at(row, column)
//   alignment                 of tiles, in bytes
//   swaps                     whether kSwapped makes a difference
//   exact_infinities          false if an infinite operand may give NaN (the non-finite fallback then corrects it)
//   row_of<kRowGroups>(i)         the row that slot i of a lane holds
//   show()                    called by every thread between its copies to shared memory and the barrier
//   scores<kRows, kDepth, kSwapped>(s, q, k)   s = Q K^T, Q having kRows rows; kSwapped: `q` are keys, `k` queries,
//                             and s is the transpose of the unswapped result, to the bit
//   values<Tile>(o, p, v)     o += P V, V being such a tile
// Both may turn finite numbers into NaN, unless their last argument says that this is the non-finite fallback.
#pragma once

#include "cuda/portable/float32_products.cuh"
#include "cuda/portable/warp_products.cuh"

namespace anyflash::cuda {

/// float16 and bfloat16 on mma.m16n8k16 (two m16n8k8 on sm_75), sums in float32.
template <class E>
struct HalfProducts : WarpProducts<E, 16, 16> {
  using Number = float;
  static constexpr bool exact_infinities = true, swaps = false;
  /// Channels of one chain of sums: 8 steps of the tensor cores, which truncate where float32 rounds. Longer sums add
  /// chains.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  static constexpr int chain = 64;
#else
  static constexpr int chain = 128;
#endif

  template <int kRows, int kDepth, bool kSwapped = false, int kRowGroups, int kTiles>
  __device__ __forceinline__ static void scores(float (&s)[kRowGroups][kTiles][2], const E* q, const E* k,
                                                bool = false) {
    constexpr int q_stride = WarpProducts<E, 16, 16>::template KeyTile<kRows, kDepth>::kStride, k_stride = q_stride;
    q += threadIdx.x / 32 * (8 * kRowGroups) * q_stride;
    static_assert(kRowGroups % 2 == 0 && kTiles % 2 == 0 && kDepth % 16 == 0 &&
                  (kDepth < chain || kDepth % chain == 0));
    const unsigned lane = lane_number();
    q += lane % 16 * q_stride + lane / 16 * 8;
    k += (lane % 8 + lane / 16 * 8) * k_stride + lane / 8 % 2 * 8;
    clear(s);
    add_products < kDepth<chain ? kDepth : chain>(s, q, q_stride, k, k_stride);
#pragma unroll
    for (int c = chain; c < kDepth; c += chain) {
      float rest[kRowGroups][kTiles][2];
      clear(rest);
      add_products<chain>(rest, q + c, q_stride, k + c, k_stride);
      add(s, rest);
    }
  }

  template <class Tile, int kRowGroups, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void values(float (&o)[kRowGroups][kTiles][2],
                                                const float (&p)[kRowGroups][kKeyTiles][2], const E* v, bool = false) {
    constexpr int v_stride = Tile::kStride;
    static_assert(kRowGroups % 2 == 0 && kKeyTiles % 2 == 0 && kTiles % 2 == 0);
    const unsigned lane = lane_number();
    v += lane % 16 * v_stride + lane / 16 * 8;
    std::uint32_t a[kRowGroups / 2][4], b[3][4];
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
        for (int i = 0; i < kRowGroups / 2; ++i)
#pragma unroll
          for (int n = 0; n < 4; ++n) a[i][n] = packed(p[2 * i + n % 2][key + n / 2]);
      }
#pragma unroll
      for (int i = 0; i < kRowGroups / 2; ++i) {
        multiply_16(o[2 * i][j], o[2 * i + 1][j], a[i], b[step % 3][0], b[step % 3][1], E());
        multiply_16(o[2 * i][j + 1], o[2 * i + 1][j + 1], a[i], b[step % 3][2], b[step % 3][3], E());
      }
    }
  }

 private:
  /// s += the products over kDepth channels; q and k: this lane's rows. Fragments are loaded two steps before they are
  /// used, because a load takes longer than one step's products.
  template <int kDepth, int kRowGroups, int kTiles>
  __device__ __forceinline__ static void add_products(float (&s)[kRowGroups][kTiles][2], const E* q, int q_stride,
                                                      const E* k, int k_stride) {
    std::uint32_t a[2][kRowGroups / 2][4], b[3][4];
    const auto load_a = [&](int c) {
#pragma unroll
      for (int i = 0; i < kRowGroups / 2; ++i) load_matrices(a[c / 16 % 2][i], q + 16 * i * q_stride + c);
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
      for (int i = 0; i < kRowGroups / 2; ++i) {
        multiply_16(s[2 * i][j], s[2 * i + 1][j], a[c / 16 % 2][i], b[step % 3][0], b[step % 3][1], E());
        multiply_16(s[2 * i][j + 1], s[2 * i + 1][j + 1], a[c / 16 % 2][i], b[step % 3][2], b[step % 3][3], E());
      }
    }
  }

  __device__ __forceinline__ static std::uint32_t packed(const float (&x)[2]) { return packed_pair(x[0], x[1], E()); }
};

#if __CUDA_ARCH__ >= 800 || !defined(__CUDA_ARCH__)

/// float64 on mma.m8n8k4; on Hopper, where slots come in pairs, on mma.m16n8k16.
struct DoubleProducts : WarpProducts<double, 32, 16> {
  using Number = double;
  static constexpr bool exact_infinities = true, swaps = false;

  template <int kRows, int kDepth, bool kSwapped = false, int kRowGroups, int kTiles>
  __device__ __forceinline__ static void scores(double (&s)[kRowGroups][kTiles][2], const double* q, const double* k,
                                                bool = false) {
    constexpr int q_stride = WarpProducts<double, 32, 16>::template KeyTile<kRows, kDepth>::kStride,
                  k_stride = q_stride;
    q += threadIdx.x / 32 * (8 * kRowGroups) * q_stride;
    const unsigned lane = lane_number();
    q += lane / 4 * q_stride + lane % 4;
    k += lane / 4 * k_stride + lane % 4;
    clear(s);
    if constexpr (wide && kRowGroups % 2 == 0) {
#pragma unroll 2
      for (int c = 0; c < kDepth; c += 16) {
        double a[kRowGroups / 2][8];
#pragma unroll
        for (int i = 0; i < kRowGroups / 2; ++i)
#pragma unroll
          for (int n = 0; n < 8; ++n) a[i][n] = q[(16 * i + n % 2 * 8) * q_stride + c + n / 2 * 4];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          double b[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) b[n] = k[8 * j * k_stride + c + 4 * n];
#pragma unroll
          for (int i = 0; i < kRowGroups / 2; ++i) multiply_64(s[2 * i][j], s[2 * i + 1][j], a[i], b);
        }
      }
    } else {
#pragma unroll 4
      for (int c = 0; c < kDepth; c += 4) {
        double a[kRowGroups];
#pragma unroll
        for (int i = 0; i < kRowGroups; ++i) a[i] = q[8 * i * q_stride + c];
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const double b = k[8 * j * k_stride + c];
#pragma unroll
          for (int i = 0; i < kRowGroups; ++i) multiply_64(s[i][j], a[i], b);
        }
      }
    }
  }

  template <class Tile, int kRowGroups, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void values(double (&o)[kRowGroups][kTiles][2],
                                                const double (&p)[kRowGroups][kKeyTiles][2], const double* v,
                                                bool = false) {
    constexpr int v_stride = Tile::kStride;
    const unsigned lane = lane_number();
    v += 2 * (lane % 4) * v_stride + lane / 4;  // column 4n + t of A is key 2t + n % 2 of tile n / 2
    if constexpr (wide && kRowGroups % 2 == 0 && kKeyTiles % 2 == 0) {
#pragma unroll
      for (int key = 0; key < kKeyTiles; key += 2)
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          double b[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) b[n] = v[(8 * (key + n / 2) + n % 2) * v_stride + 8 * j];
#pragma unroll
          for (int i = 0; i < kRowGroups / 2; ++i) {
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
            for (int i = 0; i < kRowGroups; ++i) multiply_64(o[i][j], p[i][key][e], b);
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

/// Any type on the ordinary arithmetic units, where a GPU has no tensor cores for it.
template <class E, class T>
struct PlainProducts : WarpProducts<E, sizeof(E) == 8 ? 32 : 16, 16> {
  using Number = T;
  static constexpr bool exact_infinities = true, swaps = false;

  template <int kRows, int kDepth, bool kSwapped = false, int kRowGroups, int kTiles>
  __device__ __forceinline__ static void scores(T (&s)[kRowGroups][kTiles][2], const E* q, const E* k, bool = false) {
    constexpr int q_stride = WarpProducts < E, sizeof(E) == 8 ? 32 : 16,
                  16 > ::template KeyTile<kRows, kDepth>::kStride, k_stride = q_stride;
    q += threadIdx.x / 32 * (8 * kRowGroups) * q_stride;
    const unsigned lane = lane_number();
    q += lane / 4 * q_stride;
    k += 2 * (lane % 4) * k_stride;
    clear(s);
#pragma unroll 2
    for (int c = 0; c < kDepth; ++c) {
      T a[kRowGroups];
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i) a[i] = static_cast<T>(q[8 * i * q_stride + c]);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const T b = static_cast<T>(k[(8 * j + e) * k_stride + c]);
#pragma unroll
          for (int i = 0; i < kRowGroups; ++i) s[i][j][e] += a[i] * b;
        }
    }
  }

  /// Sums each tile separately first: one chain over all keys loses more accuracy than tensor cores do.
  template <class Tile, int kRowGroups, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void values(T (&o)[kRowGroups][kTiles][2], const T (&p)[kRowGroups][kKeyTiles][2],
                                                const E* v, bool = false) {
    constexpr int kPart = kTiles < 8 ? kTiles : 8;
    static_assert(kTiles % kPart == 0);
#pragma unroll
    for (int j = 0; j < kTiles; j += kPart) {
      T sum[kRowGroups][kPart][2];
      clear(sum);
      add_values<Tile>(sum, p, v + 8 * j);
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
        for (int n = 0; n < 2 * kPart; ++n) o[i][j + n / 2][n % 2] += sum[i][n / 2][n % 2];
    }
  }

 private:
  template <class Tile, int kRowGroups, int kKeyTiles, int kTiles>
  __device__ __forceinline__ static void add_values(T (&o)[kRowGroups][kTiles][2],
                                                    const T (&p)[kRowGroups][kKeyTiles][2], const E* v) {
    constexpr int v_stride = Tile::kStride;
    const unsigned lane = lane_number();
    v += 2 * (lane % 4);
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile)
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll 1
        for (int t = 0; t < 4; ++t) {
          T a[kRowGroups];
#pragma unroll
          for (int i = 0; i < kRowGroups; ++i) a[i] = __shfl_sync(0xffffffffu, p[i][tile][e], (lane & ~3u) | t);
          const E* const row = v + (8 * tile + 2 * t + e) * v_stride;
#pragma unroll
          for (int j = 0; j < kTiles; ++j)
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const T b = static_cast<T>(row[8 * j + n]);
#pragma unroll
              for (int i = 0; i < kRowGroups; ++i) o[i][j][n] += a[i] * b;
            }
        }
  }
};

/// The policy of an element type on the GPU that is compiled for. tf32: float32 may use TF32.
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
  using type = SplitProducts;
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
