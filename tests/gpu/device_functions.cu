// Device functions of the portable kernels, each in a kernel of its own, for test_device_functions.py. Tiles are
// 64 x 64, a block of threads is four warps of 16 rows. Pointers are device memory; a function returns the runtime's
// status.
#include "cuda/portable/products.cuh"
#include "cuda/portable/rows.cuh"
#include "cuda/portable/softmax.cuh"

#include <type_traits>

namespace anyflash::cuda {
namespace {

constexpr int kSide = 64, kThreads = 128, kRowGroups = 2, kTiles = kSide / 8;

template <class Products>
using KeyTile = typename Products::template KeyTile<kSide, kSide>;
template <class Products>
using ValueTile = typename Products::template ValueTile<kSide, kSide>;

template <class E>
using NumberOf = std::conditional_t<sizeof(E) == 8, double, float>;
/// own: not the same on every GPU that is compiled for, so named inside kernels alone. plain: that of ordinary
/// multipliers.
enum class Policy { own, plain, tf32 };
template <class E, Policy policy = Policy::own>
using PolicyOf = typename std::conditional_t<policy == Policy::plain, std::type_identity<PlainProducts<E, NumberOf<E>>>,
                                             ProductsOf<E, policy == Policy::tf32>>::type;

/// Rows of a tensor one behind the other, of which some do not exist.
struct SomeRows {
  const std::uint8_t* exist;
  __device__ bool find(const Rows& rows, int row, std::int64_t& at) const {
    at = row * rows.sequence[2];
    return exist[row] != 0;
  }
};

Rows rows_of(std::int64_t row, std::int64_t channel, bool vectors) {
  return {nullptr, 0, 0, channel, {0, 0, row}, vectors};
}

// ---------------------------------------------------------------------------------------------------------- the tiles

template <class E>
__global__ void load_any_kernel(const E* from, Rows rows, int channels, SomeRows places, E* to) {
  using Tile = PaddedTile<E, kSide, kSide, 16>;
  __shared__ alignas(16) E tile[Tile::kSize];
  load_any_rows<Tile, kSide, kSide, kThreads>(tile, Source<E>{rows, from, channels}, places);
  copies_commit();
  copies_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < kSide * kSide; i += kThreads) to[i] = tile[Tile::at(i / kSide, i % kSide)];
}

template <class E>
__global__ void load_plain_kernel(const E* from, std::int64_t stride, int channels, E* to) {
  using Tile = PaddedTile<E, kSide, kSide, 16>;
  __shared__ alignas(16) E tile[Tile::kSize];
  load_plain_rows<Tile, kSide, kSide, kThreads>(tile, from, stride, channels);
  copies_commit();
  copies_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < kSide * kSide; i += kThreads) to[i] = tile[Tile::at(i / kSide, i % kSide)];
}

/// A warp stores 16 rows.
template <class E, bool kPlain>
__global__ void store_kernel(const E* from, Rows rows, int channels, SomeRows places, E* to) {
  using Tile = PaddedTile<E, kSide, kSide, 16>;
  __shared__ alignas(16) E tile[Tile::kSize];
  for (int i = threadIdx.x; i < kSide * kSide; i += kThreads) tile[Tile::at(i / kSide, i % kSide)] = from[i];
  __syncthreads();
  const int first = static_cast<int>(threadIdx.x / 32) * 16;
  const E* const own = tile + Tile::at(first, 0);
  if constexpr (kPlain) {
    store_plain_rows<16, kSide, Tile::kStride>(own, to + first * rows.sequence[2], rows.sequence[2]);
  } else {
    store_rows<16, kSide, Tile::kStride>(own, rows, to, places, first, channels);
  }
}

// ------------------------------------------------------------------------------------------------------- the products

/// Where number n of a lane's row i lies.
template <class Products>
__device__ int place_of(int i, int n) {
  return Products::template row_of<kRowGroups>(i) * kSide + n / 2 * 8 + 2 * static_cast<int>(lane_number() % 4) + n % 2;
}
template <class Products, class T>
__device__ void store_numbers(const T (&x)[kRowGroups][kTiles][2], T* to) {
  for (int i = 0; i < kRowGroups; ++i)
    for (int n = 0; n < 2 * kTiles; ++n) to[place_of<Products>(i, n)] = x[i][n / 2][n % 2];
}
template <class Products, class T>
__device__ void load_numbers(T (&x)[kRowGroups][kTiles][2], const T* from) {
  for (int i = 0; i < kRowGroups; ++i)
    for (int n = 0; n < 2 * kTiles; ++n) x[i][n / 2][n % 2] = from[place_of<Products>(i, n)];
}

template <class E, Policy policy, bool kSwapped>
__global__ void scores_kernel(const E* q, const E* k, NumberOf<E>* s) {
  extern __shared__ __align__(1024) char memory[];
  using Products = PolicyOf<E, policy>;
  using Tile = KeyTile<Products>;
  auto *const q_tile = reinterpret_cast<E*>(memory), *const k_tile = q_tile + Tile::kSize;
  for (int i = threadIdx.x; i < kSide * kSide; i += kThreads)
    q_tile[Tile::at(i / kSide, i % kSide)] = q[i], k_tile[Tile::at(i / kSide, i % kSide)] = k[i];
  Products::show();
  __syncthreads();
  NumberOf<E> own[kRowGroups][kTiles][2];
  Products::template scores<kSide, kSide, kSwapped>(own, q_tile, k_tile);
  store_numbers<Products>(own, s);
}

/// o += p v
template <class E, Policy policy>
__global__ void values_kernel(const NumberOf<E>* p, const E* v, NumberOf<E>* o) {
  extern __shared__ __align__(1024) char memory[];
  using Products = PolicyOf<E, policy>;
  using Tile = ValueTile<Products>;
  auto* const tile = reinterpret_cast<E*>(memory);
  for (int i = threadIdx.x; i < kSide * kSide; i += kThreads) tile[Tile::at(i / kSide, i % kSide)] = v[i];
  Products::show();
  __syncthreads();
  NumberOf<E> own_p[kRowGroups][kTiles][2], own_o[kRowGroups][kTiles][2];
  load_numbers<Products>(own_p, p), load_numbers<Products>(own_o, o);
  Products::template values<Tile>(own_o, own_p, tile);
  store_numbers<Products>(own_o, o);
}

// -------------------------------------------------------------------------------------------------- rows of the scores

template <class T>
__global__ void quad_kernel(const T* from, T* largest, T* sum) {
  largest[threadIdx.x] = quad_largest(from[threadIdx.x]), sum[threadIdx.x] = quad_sum(from[threadIdx.x]);
}

template <class E>
__global__ void hide_kernel(NumberOf<E>* s, const rules::Word* words) {
  using Products = PolicyOf<E>;
  NumberOf<E> own[kRowGroups][kTiles][2];
  load_numbers<Products>(own, s);
  for (int i = 0; i < kRowGroups; ++i) hide_pairs(own[i], words[Products::template row_of<kRowGroups>(i)]);
  store_numbers<Products>(own, s);
}

template <class T>
struct Terms {
  T own_scale, own_unit, own_lag;
  __device__ T scale() const { return own_scale; }
  __device__ T unit() const { return own_unit; }
  __device__ T lag() const { return own_lag; }
};

/// Some tiles of scores, one behind the other. o: of P and ones, so that it ends as the sum does. p: of the last tile.
template <class E, class T = NumberOf<E>>
__global__ void softmax_kernel(const T* s, int tiles, Terms<T> terms, T* shift, T* largest, T* sum, T* o, T* p) {
  using Products = PolicyOf<E>;
  OnlineSoftmax<E, T, kRowGroups> rows;
  T own[kRowGroups][kTiles][2], own_o[kRowGroups][1][2] = {};
  for (int i = 0; i < kRowGroups; ++i) rows.shift[i] = rows.largest[i] = -infinity<T>(), rows.sum[i] = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    load_numbers<Products>(own, s + tile * kSide * kSide);
    rows.step(own, own_o, terms);
    for (int i = 0; i < kRowGroups; ++i)
      for (int n = 0; n < 2 * kTiles; ++n) own_o[i][0][n % 2] += own[i][n / 2][n % 2];
  }
  store_numbers<Products>(own, p);
  for (int i = 0; i < kRowGroups; ++i) {
    const int row = Products::template row_of<kRowGroups>(i);
    const T all = quad_sum(rows.sum[i]), all_o = quad_sum(own_o[i][0][0] + own_o[i][0][1]);
    const T highest = quad_largest(rows.largest[i]);
    if (lane_number() % 4 == 0) shift[row] = rows.shift[i], largest[row] = highest, sum[row] = all, o[row] = all_o;
  }
}

// --------------------------------------------------------------------------------------------------------- from Python

template <class... Parameters, class... Arguments>
int run(void (*kernel)(Parameters...), int threads, int bytes, Arguments... arguments) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  kernel<<<1, threads, bytes>>>(arguments...);
  const auto status = cudaGetLastError();
  return status == cudaSuccess ? cudaDeviceSynchronize() : status;
}

template <class E, Policy policy>
int scores(const void* q, const void* k, bool swapped, void* s) {
  const auto kernel = swapped ? scores_kernel<E, policy, true> : scores_kernel<E, policy, false>;
  return run(kernel, kThreads, 2 * KeyTile<PolicyOf<E, policy>>::kSize * sizeof(E), static_cast<const E*>(q),
             static_cast<const E*>(k), static_cast<NumberOf<E>*>(s));
}
template <class E, Policy policy>
int values(const void* p, const void* v, void* o) {
  return run(values_kernel<E, policy>, kThreads, ValueTile<PolicyOf<E, policy>>::kSize * sizeof(E),
             static_cast<const NumberOf<E>*>(p), static_cast<const E*>(v), static_cast<NumberOf<E>*>(o));
}

}  // namespace
}  // namespace anyflash::cuda

using namespace anyflash::cuda;

#define OF_TYPE(NAME, E)                                                                                               \
  extern "C" int load_any_##NAME(const void* from, std::int64_t row, std::int64_t channel, bool vectors, int channels, \
                                 const std::uint8_t* exist, void* to) {                                                \
    return run(load_any_kernel<E>, kThreads, 0, static_cast<const E*>(from), rows_of(row, channel, vectors), channels, \
               SomeRows{exist}, static_cast<E*>(to));                                                                  \
  }                                                                                                                    \
  extern "C" int load_plain_##NAME(const void* from, std::int64_t row, int channels, void* to) {                       \
    return run(load_plain_kernel<E>, kThreads, 0, static_cast<const E*>(from), row, channels, static_cast<E*>(to));    \
  }                                                                                                                    \
  extern "C" int store_any_##NAME(const void* from, std::int64_t row, std::int64_t channel, bool vectors,              \
                                  int channels, const std::uint8_t* exist, void* to) {                                 \
    return run(store_kernel<E, false>, kThreads, 0, static_cast<const E*>(from), rows_of(row, channel, vectors),       \
               channels, SomeRows{exist}, static_cast<E*>(to));                                                        \
  }                                                                                                                    \
  extern "C" int store_plain_##NAME(const void* from, std::int64_t row, void* to) {                                    \
    return run(store_kernel<E, true>, kThreads, 0, static_cast<const E*>(from), rows_of(row, 1, true), kSide,          \
               SomeRows{}, static_cast<E*>(to));                                                                       \
  }                                                                                                                    \
  extern "C" int hide_##NAME(void* s, const void* words) {                                                             \
    using T = NumberOf<E>;                                                                                             \
    return run(hide_kernel<E>, kThreads, 0, static_cast<T*>(s), static_cast<const anyflash::rules::Word*>(words));     \
  }                                                                                                                    \
  extern "C" int softmax_##NAME(const void* s, int tiles, double scale, double unit, double lag, void* shift,          \
                                void* largest, void* sum, void* o, void* p) {                                          \
    using T = NumberOf<E>;                                                                                             \
    return run(softmax_kernel<E>, kThreads, 0, static_cast<const T*>(s), tiles, Terms<T>{T(scale), T(unit), T(lag)},   \
               static_cast<T*>(shift), static_cast<T*>(largest), static_cast<T*>(sum), static_cast<T*>(o),             \
               static_cast<T*>(p));                                                                                    \
  }
#define PRODUCTS(NAME, E, POLICY)                                                     \
  extern "C" int scores_##NAME(const void* q, const void* k, bool swapped, void* s) { \
    return scores<E, Policy::POLICY>(q, k, swapped, s);                               \
  }                                                                                   \
  extern "C" int values_##NAME(const void* p, const void* v, void* o) { return values<E, Policy::POLICY>(p, v, o); }

OF_TYPE(float16, __half)
OF_TYPE(bfloat16, __nv_bfloat16)
OF_TYPE(float32, float)
OF_TYPE(float64, double)
PRODUCTS(float16, __half, own)
PRODUCTS(bfloat16, __nv_bfloat16, own)
PRODUCTS(float32, float, own)
PRODUCTS(float64, double, own)
PRODUCTS(tf32_float32, float, tf32)
PRODUCTS(plain_bfloat16, __nv_bfloat16, plain)
PRODUCTS(plain_float32, float, plain)
PRODUCTS(plain_float64, double, plain)

extern "C" int quad_float32(const void* from, void* largest, void* sum) {
  return run(quad_kernel<float>, 32, 0, static_cast<const float*>(from), static_cast<float*>(largest),
             static_cast<float*>(sum));
}
extern "C" int quad_float64(const void* from, void* largest, void* sum) {
  return run(quad_kernel<double>, 32, 0, static_cast<const double*>(from), static_cast<double*>(largest),
             static_cast<double*>(sum));
}
