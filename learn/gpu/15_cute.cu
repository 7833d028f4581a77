// Rung 15: rung 14 in CuTe, the layout algebra of NVIDIA's CUTLASS.
//
// Changed: what computes addresses, and nothing else. A CuTe layout is a function from coordinates to
// memory: a shape, and a stride for each part of it. Layouts are divided, composed and transposed like numbers, at
// compile time. A tiled copy and a tiled mma are layouts too: which thread has which number. So a copy is `copy`, a
// product is `gemm`, the swizzle is one type, V transposed is another layout of the same bytes, and the results of
// Q K^T are the left operand of P V by a layout that counts the same registers differently.
// Expected: a little more than rung 14; it is a fifth to a quarter. nvdisasm shows as many mma, ldmatrix and
// exponentials in both, but half as many instructions in all: CuTe knows all counts at compile time. It costs compile
// time, and errors that fill pages.
// Measured (NVIDIA H200): d64 full 281; d64 causal 246; d128 full 289; d128 causal 249 TFLOP/s.
#include <cute/tensor.hpp>

#include "device.h"

namespace rung_15 {  // CuTe has nameless ones, which nvcc's code for the host would mix up with ours

using namespace cute;

constexpr int kBlock = 64, kThreads = 128;  // queries, and keys
constexpr float kLog2e = 1.44269504f;

template <int d>
using Rows_x_d = Shape<Int<kBlock>, Int<d>>;
// 8 rows of 64 numbers whose 16 bytes number c lie in place c XOR row, repeated over the tile.
using SwizzledRows = decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
template <int d>
using Tile_of = decltype(tile_to_shape(SwizzledRows{}, Rows_x_d<d>{}));
// The same bytes with columns as rows.
template <int d>
using Transposed = decltype(composition(Tile_of<d>{}, Layout<Shape<Int<d>, Int<kBlock>>, Stride<Int<kBlock>, _1>>{}));

// mma.sync in four warps, 16 rows each; two products side by side, as one ldmatrix brings operands for two.
using Mma = TiledMMA<MMA_Atom<SM80_16x8x16_F32F16F16F32_TN>, Layout<Shape<_4, _1, _1>>, Tile<_64, _16, _16>>;
using Ldmatrix = Copy_Atom<SM75_U32x4_LDSM_N, half_t>;
using LdmatrixTrans = Copy_Atom<SM75_U16x8_LDSM_T, half_t>;
// cp.async of 16 bytes or zeros: eight threads for 64 numbers of a row, 16 rows at a time.
using CopyRows = decltype(make_tiled_copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, half_t>{},
                                          Layout<Shape<_16, _8>, Stride<_8, _1>>{}, Layout<Shape<_1, _8>>{}));

template <int d>
struct Shared {
  __device__ auto tile(half_t* numbers) { return make_tensor(make_smem_ptr(numbers), Tile_of<d>{}); }
  __device__ auto transposed(half_t* numbers) { return make_tensor(make_smem_ptr(numbers), Transposed<d>{}); }
  alignas(128) half_t k[2][kBlock * d], v[2][kBlock * d];
};

// Head `head` of a tensor (heads, rows, d).
template <int d, class T>
__device__ auto head_of(T* data, int rows, int head) {
  using Number = std::conditional_t<std::is_const_v<T>, const half_t, half_t>;
  return make_tensor(make_gmem_ptr(reinterpret_cast<Number*>(data) + std::size_t(head) * rows * d),
                     make_layout(make_shape(rows, Int<d>{}), make_stride(Int<d>{}, _1{})));
}

// Begins to copy rows from row0 on; zeros beyond the sequence.
template <int d, class From, class To>
__device__ void copy_rows(const From& head, int row0, To&& to) {
  const auto thread = CopyRows{}.get_slice(threadIdx.x);
  const auto from = thread.partition_S(local_tile(head, Rows_x_d<d>{}, make_coord(row0 / kBlock, 0)));
  const auto place = thread.partition_S(make_identity_tensor(Rows_x_d<d>{}));
  auto here = thread.partition_D(to);  // (16 bytes, rows, columns) of this thread
#pragma unroll
  for (int n = 0; n < size<1>(here); ++n)
    copy(CopyRows{}.with(row0 + get<0>(place(0, n, 0)) < size<0>(head)), from(_, n, _), here(_, n, _));
}

// c += a b^T; a in registers, b by ldmatrix from shared memory.
template <class Load, class C, class A, class B>
__device__ void multiply(C& c, const A& a, const B& b, const Load& atom) {
  const auto load = make_tiled_copy_B(atom, Mma{}).get_slice(threadIdx.x);
  auto fragment = make_tensor<half_t>(partition_shape_B(Mma{}, shape(b)));
  const auto from = load.partition_S(b);
  auto to = load.retile_D(fragment);
#pragma unroll
  for (int n = 0; n < size<2>(a); ++n) {
    copy(atom, from(_, _, n), to(_, _, n));
    gemm(Mma{}, a(_, _, n), fragment(_, _, n), c);
  }
}

// mma's results ((2 columns, 2 rows), 1, tiles) as a matrix: the lane's two rows, and its columns.
template <class T>
__device__ auto by_rows(T&& c) {
  const auto l = c.layout();
  return make_tensor(c.data(), make_layout(make_layout(get<0, 1>(l), get<1>(l)), make_layout(get<0, 0>(l), get<2>(l))));
}

// The same registers as a left operand ((2 columns, 2 rows, 2 halves), 1, steps of 16).
template <class T>
__device__ auto as_operand(T&& c) {
  const auto l = logical_divide(c.layout(), Shape<X, X, _2>{});
  return make_tensor(c.data(),
                     make_layout(make_layout(get<0, 0>(l), get<0, 1>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l)));
}

template <class T>
__device__ auto rounded(const T& x) {
  auto to = make_tensor<half_t>(x.layout());
#pragma unroll
  for (int n = 0; n < size(x); ++n) to(n) = half_t(x(n));
  return to;
}

// Joins the four lanes of a row.
template <class Join>
__device__ __forceinline__ float reduce_row(float x, const Join& join) {
  x = join(x, __shfl_xor_sync(~0u, x, 1));
  return join(x, __shfl_xor_sync(~0u, x, 2));
}

template <int d>
__global__ void __launch_bounds__(kThreads) flash(AttentionOf<half> p) {
  Shared<d>& shared = *shared_memory<Shared<d>>();
  const int h = blockIdx.y, block = gridDim.x - 1 - blockIdx.x, i0 = block * kBlock;
  const auto all_k = head_of<d>(p.k, p.keys, h), all_v = head_of<d>(p.v, p.keys, h);
  copy_rows<d>(head_of<d>(p.q, p.queries, h), i0, shared.tile(shared.k[1]));  // Q passes through K's place
  cp_async_fence();
  const auto copy_keys = [&](int j0) {
    copy_rows<d>(all_k, j0, shared.tile(shared.k[j0 / kBlock % 2]));
    copy_rows<d>(all_v, j0, shared.tile(shared.v[j0 / kBlock % 2]));
    cp_async_fence();
  };
  copy_keys(0);
  cp_async_wait<1>();  // Q is there; the first keys may be on their way
  __syncthreads();
  const auto load_q = make_tiled_copy_A(Ldmatrix{}, Mma{}).get_slice(threadIdx.x);
  auto q = make_tensor<half_t>(partition_shape_A(Mma{}, Rows_x_d<d>{}));
  copy(Ldmatrix{}, load_q.partition_S(shared.tile(shared.k[1])), load_q.retile_D(q));

  const auto thread = Mma{}.get_slice(threadIdx.x);
  const auto place = by_rows(thread.partition_C(make_identity_tensor(Rows_x_d<kBlock>{})));  // of the lane's scores
  auto o = partition_fragment_C(Mma{}, Rows_x_d<d>{});
  auto o_rows = by_rows(o);
  clear(o);
  const float scale_log2 = kLog2e * rsqrtf(float(d));
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {};
  const int keys = p.causal ? min(p.keys, i0 + kBlock) : p.keys;
  for (int j0 = 0; j0 < keys; j0 += kBlock) {
    const int buffer = j0 / kBlock % 2;
    cp_async_wait<0>();
    __syncthreads();  // of all threads
    if (j0 + kBlock < keys) copy_keys(j0 + kBlock);
    auto s = partition_fragment_C(Mma{}, Rows_x_d<kBlock>{});
    auto s_rows = by_rows(s);
    clear(s);
    multiply(s, q, shared.tile(shared.k[buffer]), Ldmatrix{});
    if (j0 + kBlock > p.keys || (p.causal && j0 + kBlock > i0))
#pragma unroll
      for (int n = 0; n < size(s_rows); ++n) {
        const int i = i0 + get<0>(place(n)), j = j0 + get<1>(place(n));
        if (j >= p.keys || (p.causal && j > i)) s_rows(n) = -INFINITY;
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // scores become weights; o is rescaled
      float largest = m[r];
#pragma unroll
      for (int n = 0; n < size<1>(s_rows); ++n) largest = fmaxf(largest, s_rows(r, n));
      largest = reduce_row(largest, [](float a, float b) { return fmaxf(a, b); });
      const float shift = largest == -INFINITY ? 0 : largest * scale_log2;  // no key yet: exp2(-infinity - 0) = 0
      const float factor = exp2f(m[r] * scale_log2 - shift);
      m[r] = largest, l[r] *= factor;
#pragma unroll
      for (int n = 0; n < size<1>(s_rows); ++n) l[r] += s_rows(r, n) = exp2f(fmaf(s_rows(r, n), scale_log2, -shift));
#pragma unroll
      for (int n = 0; n < size<1>(o_rows); ++n) o_rows(r, n) *= factor;
    }
    multiply(o, as_operand(rounded(s)), shared.transposed(shared.v[buffer]), LdmatrixTrans{});
  }
  cp_async_wait<0>();  // without any keys

  auto to =
      by_rows(thread.partition_C(local_tile(head_of<d>(p.out, p.queries, h), Rows_x_d<d>{}, make_coord(block, 0))));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = reduce_row(l[r], [](float a, float b) { return a + b; }), inverse = sum > 0 ? 1 / sum : 0;
    const int i = i0 + get<0>(place(r, 0));
    if (i >= p.queries) continue;
    if (threadIdx.x % 4 == 0)
      p.lse[std::size_t(h) * p.queries + i] = sum > 0 ? m[r] * rsqrtf(float(d)) + log2f(sum) / kLog2e : -INFINITY;
#pragma unroll
    for (int n = 0; n < size<1>(o_rows); ++n) o_rows(r, n) *= inverse;
    copy_aligned(rounded(o_rows(r, _)), to(r, _));
  }
}

}  // namespace rung_15

extern "C" void rung(const AttentionOf<half>* p) {
  using namespace rung_15;
  const dim3 grid(blocks_of(p->queries, kBlock), p->heads);
  if (p->d == 64) return launch(flash<64>, grid, kThreads, sizeof(Shared<64>), *p);
  launch(flash<128>, grid, kThreads, sizeof(Shared<128>), *p);
}
