// Rung 25: the backward pass by wgmma and TMA (sm_90a).
//
// Changed: rung 24's two kernels with rung 17's means. A thread block keeps 128 rows (keys, or queries) for two consumer
// warpgroups, and a producer warpgroup streams the other side in steps of 64 rows, two buffers, by TMA. S and dP come
// from shared memory by descriptors; P and dS are left operands in registers. The streamed tiles serve twice: as rows
// of a product with the other side's rows, and, in the same bytes, as columns: a descriptor says which. The exponentials
// run beside the product dP, and dS is made beside the product for dV.
// Expected: twice rung 24. The limit is 5 / 7 of a kernel that makes S and dP once.
// Measured: not yet.
#include "ptx.h"

namespace {

constexpr int kRows = 128, kStep = 64, kThreads = 384;  // rows that stay; rows that are streamed
constexpr float kLog2e = 1.44269504f;

// a and b stay: K and V for dK and dV, or Q and dO for dQ. c and e are streamed: Q and dO, or K and V.
struct Maps {
  CUtensorMap a, b, c, e;
};

template <int d>
struct Shared {
  TmaTile<kRows, d> a, b;
  TmaTile<kStep, d> c[2], e[2];
  Barrier ready, full[2], empty[2];
};

// lhs rhs^T, issued.
template <int d>
__device__ __forceinline__ void multiply_abt(float (&s)[kStep / 8][4], TmaTile<kRows, d>& lhs, int row,
                                             TmaTile<kStep, d>& rhs) {
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < d; c += 16) wgmma_abt(s, descriptor(lhs.at(row, c), 0), descriptor(rhs.at(0, c), 0), c > 0);
  wgmma_commit();
}

// to += lhs rhs, issued; lhs in registers.
template <int d>
__device__ __forceinline__ void multiply_ab(float (&to)[d / 8][4], const std::uint32_t (&lhs)[kStep / 16][4],
                                            TmaTile<kStep, d>& rhs) {
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < kStep / 16; ++n) wgmma_ab(to, lhs[n], descriptor(rhs.at(16 * n, 0), rhs.kPanel), true);
  wgmma_commit();
}

__device__ __forceinline__ void pack_operand(std::uint32_t (&a)[kStep / 16][4], const float (&s)[kStep / 8][4]) {
#pragma unroll
  for (int j = 0; j < kStep / 16; ++j)
#pragma unroll
    for (int n = 0; n < 4; ++n) a[j][n] = pack(s[2 * j + n / 2][n % 2 * 2], s[2 * j + n / 2][n % 2 * 2 + 1]);
}

// Number m of tile n of the lane's part of S. row: the lane's first of the rows that stay; at: the first streamed row.
struct Place {
  __device__ __forceinline__ Place(bool of_keys, int row, int at, int n, int m) {
    const int this_row = row + m / 2 * 8, column = at + 8 * n + threadIdx.x % 4 * 2 + m % 2;
    query = of_keys ? column : this_row, key = of_keys ? this_row : column;
  }
  int query, key;
};

template <int d, bool of_keys>
__device__ __forceinline__ void consume(Shared<d>& shared, const AttentionOf<half>& p, const float2* statistics,
                                        int row0, int begin, int end) {
  const int rows = of_keys ? p.keys : p.queries, row = row0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  float first[d / 8][4] = {}, second[d / 8][4] = {};  // dK and dV, or dQ
  shared.ready.wait(0);
  for (int at = begin, n = 0; at < end; at += kStep, ++n) {
    float s[kStep / 8][4], dp[kStep / 8][4];
    std::uint32_t weights[kStep / 16][4], ds[kStep / 16][4];
    TmaTile<kStep, d>&c = shared.c[n % 2], &e = shared.e[n % 2];
    shared.full[n % 2].wait(n / 2 % 2);
    multiply_abt<d>(s, shared.a, threadIdx.x / 128 * 64, c);
    multiply_abt<d>(dp, shared.b, threadIdx.x / 128 * 64, e);
    wgmma_wait<1>(s);
    for (int tile = 0; tile < kStep / 8; ++tile)  // P, beside the product dP
      for (int m = 0; m < 4; ++m) {
        const Place place(of_keys, row, at, tile, m);
        const bool hidden = place.query >= p.queries || place.key >= p.keys || (p.causal && place.key > place.query);
        const float lse = statistics[min(place.query, p.queries - 1)].x;
        s[tile][m] = hidden ? 0 : exp2f(fmaf(s[tile][m], kLog2e * rsqrtf(float(d)), -lse));
      }
    wgmma_wait<0>(dp);
    if constexpr (of_keys) {
      pack_operand(weights, s);
      multiply_ab<d>(second, weights, e);
    }
    for (int tile = 0; tile < kStep / 8; ++tile)  // dS, beside the product dV
      for (int m = 0; m < 4; ++m) {
        const Place place(of_keys, row, at, tile, m);
        dp[tile][m] = s[tile][m] * (dp[tile][m] - statistics[min(place.query, p.queries - 1)].y);
      }
    pack_operand(ds, dp);
    multiply_ab<d>(first, ds, c);
    wgmma_wait<0>(first);
    if constexpr (of_keys) wgmma_wait<0>(second);  // done; to tell the compiler
    if (threadIdx.x % 32 == 0) shared.empty[n % 2].arrive();
  }
  const auto store = [&](half* to, const float (&from)[d / 8][4], float factor) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (row + 8 * r < rows)
#pragma unroll
        for (int n = 0; n < d / 8; ++n)
          *reinterpret_cast<std::uint32_t*>(to + (std::size_t(blockIdx.y) * rows + row + 8 * r) * d + 8 * n +
                                            threadIdx.x % 4 * 2) =
              pack(from[n][2 * r] * factor, from[n][2 * r + 1] * factor);
  };
  store(of_keys ? p.dk : p.dq, first, rsqrtf(float(d)));
  if constexpr (of_keys) store(p.dv, second, 1);
}

template <int d, bool of_keys>
__global__ void __launch_bounds__(kThreads, 1)
    backward(AttentionOf<half> p, const float2* statistics, const __grid_constant__ Maps maps) {
  Shared<d>& shared = *shared_memory<Shared<d>>();
  const int h = blockIdx.y, row0 = (of_keys ? blockIdx.x : gridDim.x - 1 - blockIdx.x) * kRows;  // the longest first
  const int begin = p.causal && of_keys ? row0 : 0, streamed = of_keys ? p.queries : p.keys;
  const int end = p.causal && !of_keys ? min(streamed, row0 + kRows) : streamed;
  if (threadIdx.x == 0) {
    shared.ready.init(1);
    for (int n = 0; n < 2; ++n) shared.full[n].init(1), shared.empty[n].init(8);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 256) {
    more_registers<240>();
    consume<d, of_keys>(shared, p, statistics + std::size_t(h) * p.queries, row0, begin, end);
  } else {
    fewer_registers<24>();
    if (threadIdx.x > 256) return;
    shared.ready.arrive_expect(2 * shared.a.kBytes);
    shared.a.load(maps.a, shared.ready, row0, h);
    shared.b.load(maps.b, shared.ready, row0, h);
    for (int at = begin, n = 0; at < end; at += kStep, ++n) {
      shared.empty[n % 2].wait(n / 2 % 2 ^ 1);
      shared.full[n % 2].arrive_expect(2 * shared.c[0].kBytes);
      shared.c[n % 2].load(maps.c, shared.full[n % 2], at, h);
      shared.e[n % 2].load(maps.e, shared.full[n % 2], at, h);
    }
  }
}

// lse in units of log2 and delta of each query; infinity and 0 for one that sees no key: exp2(S - infinity) = 0.
__global__ void find_statistics(AttentionOf<half> p, float2* statistics) {
  const std::size_t row = blockIdx.x * std::size_t(blockDim.x / 32) + threadIdx.x / 32;
  if (row >= std::size_t(p.heads) * p.queries) return;
  float sum = 0;
  for (int c = threadIdx.x % 32; c < p.d; c += 32)
    sum += __half2float(p.dout[row * p.d + c]) * __half2float(p.out[row * p.d + c]);
  for (int with = 16; with > 0; with /= 2) sum += __shfl_xor_sync(~0u, sum, with);
  const bool sees = p.lse[row] > -INFINITY;
  if (threadIdx.x % 32 == 0) statistics[row] = make_float2(sees ? p.lse[row] * kLog2e : INFINITY, sees ? sum : 0);
}

template <int d>
void launch_both(const AttentionOf<half>& p) {
  const int rows = p.heads * p.queries;
  const DeviceArray<float2> statistics(rows);
  launch(find_statistics, blocks_of(rows, 8), 256, 0, p, statistics.data);
  const auto queries = [&](const half* from, int box) { return tensor_map(from, p.heads, p.queries, d, box); };
  const auto keys = [&](const half* from, int box) { return tensor_map(from, p.heads, p.keys, d, box); };
  const Maps of_keys = {keys(p.k, kRows), keys(p.v, kRows), queries(p.q, kStep), queries(p.dout, kStep)};
  const Maps of_queries = {queries(p.q, kRows), queries(p.dout, kRows), keys(p.k, kStep), keys(p.v, kStep)};
  launch(backward<d, true>, dim3(blocks_of(p.keys, kRows), p.heads), kThreads, sizeof(Shared<d>), p, statistics.data,
         of_keys);
  launch(backward<d, false>, dim3(blocks_of(p.queries, kRows), p.heads), kThreads, sizeof(Shared<d>), p,
         statistics.data, of_queries);
}

}  // namespace

extern "C" void rung(const AttentionOf<half>* p) { p->d == 64 ? launch_both<64>(*p) : launch_both<128>(*p); }
