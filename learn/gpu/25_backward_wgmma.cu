// Rung 25: the backward pass by wgmma and TMA (sm_90a).
//
// Changed: rung 24's two kernels with rung 17's means. A thread block keeps 128 rows (keys, or queries) for two consumer
// warpgroups, and a producer warpgroup streams the other side in steps of 64 rows, two buffers, by TMA. S and dP come
// from shared memory by descriptors; P and dS are left operands in registers. The streamed tiles serve twice: as rows
// of a product with the other side's rows, and, in the same bytes, as columns: a descriptor says which.
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
#pragma unroll
  for (int c = 0; c < d; c += 16) wgmma_abt(s, descriptor(lhs.at(row, c), 0), descriptor(rhs.at(0, c), 0), c > 0);
}

// to += lhs rhs, issued; lhs in registers.
template <int d>
__device__ __forceinline__ void multiply_ab(float (&to)[d / 8][4], const std::uint32_t (&lhs)[kStep / 16][4],
                                            TmaTile<kStep, d>& rhs) {
#pragma unroll
  for (int n = 0; n < kStep / 16; ++n) wgmma_ab(to, lhs[n], descriptor(rhs.at(16 * n, 0), rhs.kPanel), true);
}

__device__ __forceinline__ void pack_operand(std::uint32_t (&a)[kStep / 16][4], const float (&s)[kStep / 8][4]) {
#pragma unroll
  for (int j = 0; j < kStep / 16; ++j)
#pragma unroll
    for (int n = 0; n < 4; ++n) a[j][n] = pack(s[2 * j + n / 2][n % 2 * 2], s[2 * j + n / 2][n % 2 * 2 + 1]);
}

// S becomes P and dP becomes dS. row: the lane's first of the rows that stay; at: the first streamed row.
template <int d, bool of_keys>
__device__ __forceinline__ void weigh(float (&s)[kStep / 8][4], float (&dp)[kStep / 8][4], const AttentionOf<half>& p,
                                      const float2* statistics, int row, int at) {
#pragma unroll
  for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int this_row = row + m / 2 * 8, column = at + 8 * n + threadIdx.x % 4 * 2 + m % 2;
      const int i = of_keys ? column : this_row, j = of_keys ? this_row : column;
      const float2 of_query = statistics[min(i, p.queries - 1)];
      const float weight = exp2f(fmaf(s[n][m], kLog2e * rsqrtf(float(d)), -of_query.x));
      s[n][m] = i >= p.queries || j >= p.keys || (p.causal && j > i) ? 0 : weight;
      dp[n][m] = s[n][m] * (dp[n][m] - of_query.y);
    }
}

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
    wgmma_fence();
    multiply_abt<d>(s, shared.a, threadIdx.x / 128 * 64, c);
    multiply_abt<d>(dp, shared.b, threadIdx.x / 128 * 64, e);
    wgmma_commit();
    wgmma_wait<0>(s);
    wgmma_wait<0>(dp);  // to tell the compiler
    weigh<d, of_keys>(s, dp, p, statistics, row, at);
    pack_operand(ds, dp);
    if constexpr (of_keys) pack_operand(weights, s);
    wgmma_fence();
    multiply_ab<d>(first, ds, c);
    if constexpr (of_keys) multiply_ab<d>(second, weights, e);
    wgmma_commit();
    wgmma_wait<0>(first);
    if constexpr (of_keys) wgmma_wait<0>(second);
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
