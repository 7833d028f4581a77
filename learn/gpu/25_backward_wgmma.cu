// Rung 25: the backward pass by wgmma and TMA, five products (sm_90a).
// Changed: rung 17's means. A thread block keeps 128 keys for two consumer warpgroups; a producer streams Q and dO by TMA.
// S^T and dP^T come from shared memory by descriptors; P^T and dS^T are left operands in registers, for dV and dK. For dQ,
// dS^T goes to shared memory: the same bytes, read as columns, are dS. So S and dP are made once, where rung 24 makes
// them twice. dQ sums over thread blocks: TMA adds a whole tile to float32 sums in global memory.
// Expected: three times rung 24. It is 2.6 to 3.0 times: the warpgroups wait for each other once in a step.
// With 128 channels, causal, runs differ most: 349 and 402 TFLOP/s. Why is not known.
// Measured (NVIDIA H200): d64 full 405; d64 causal 365; d128 full 473; d128 causal 365 TFLOP/s.
#include "ptx.h"

namespace {

constexpr int kKeys = 128, kThreads = 384, kHeads = 8;
constexpr float kLog2e = 1.44269504f;
// A step's queries: so many that a warpgroup's scores fit into registers beside dK and dV.
template <int d>
constexpr int kQueries = d == 64 ? 128 : 64;

struct Maps {
  CUtensorMap q, k, v, dout;
};

template <int d>
struct Shared {
  TmaTile<kKeys, d> k, v;
  TmaTile<kQueries<d>, d> q[2], dout[2];
  TmaTile<kKeys, kQueries<d>> ds[2];  // transposed: a row for each key
  float4 dq[2][8][128];               // [warpgroup][tile][lane]: its numbers of the tile
  float2 statistics[2][kQueries<d>];
  Barrier ready, full[2], empty[2];
};

// a b^T, issued.
template <int d, int rows, int tiles>
__device__ __forceinline__ void multiply_abt(float (&s)[tiles][4], TmaTile<kKeys, d>& a, int row, TmaTile<rows, d>& b) {
  wgmma_fence();
  for (int c = 0; c < d; c += 16) wgmma_abt(s, descriptor(a.at(row, c), 0), descriptor(b.at(0, c), 0), c > 0);
  wgmma_commit();
}

// c += a b, issued; a in registers.
template <int d, int rows>
__device__ __forceinline__ void multiply_ab(float (&c)[d / 8][4], const std::uint32_t (&a)[rows / 16][4],
                                            TmaTile<rows, d>& b) {
  wgmma_fence();
  for (int n = 0; n < rows / 16; ++n) wgmma_ab(c, a[n], descriptor(b.at(16 * n, 0), b.kPanel), true);
  wgmma_commit();
}

template <int tiles>
__device__ __forceinline__ void pack_operand(std::uint32_t (&a)[tiles / 2][4], const float (&s)[tiles][4]) {
  for (int j = 0; j < tiles / 2; ++j)
    for (int n = 0; n < 4; ++n) a[j][n] = pack(s[2 * j + n / 2][n % 2 * 2], s[2 * j + n / 2][n % 2 * 2 + 1]);
}

// sums: of this head's dQ.
template <int d>
__device__ __forceinline__ void consume(Shared<d>& shared, const AttentionOf<half>& p, float4* sums, int h, int key0,
                                        int begin) {
  constexpr int kStep = kQueries<d>;
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, key = key0 + row, t = threadIdx.x % 4;
  const int group = threadIdx.x / 128, lane = threadIdx.x % 128;
  float dk[d / 8][4] = {}, dv[d / 8][4] = {};
  shared.ready.wait(0);
  for (int at = begin, n = 0; at < p.queries; at += kStep, ++n) {
    float s[kStep / 8][4], dp[kStep / 8][4], dq[8][4];
    std::uint32_t weights[kStep / 16][4], ds[kStep / 16][4];
    const auto statistics = [&](int j) { return *reinterpret_cast<float4*>(&shared.statistics[n % 2][8 * j + 2 * t]); };
    shared.full[n % 2].wait(n / 2 % 2);
    multiply_abt(s, shared.k, 64 * group, shared.q[n % 2]);
    multiply_abt(dp, shared.v, 64 * group, shared.dout[n % 2]);
    wgmma_wait<1>(s);
    if (key0 + kKeys > p.keys || (p.causal && at < key0 + kKeys))
      for (int j = 0; j < kStep / 8; ++j)
        for (int e = 0; e < 4; ++e)
          if (const int mine = key + e / 2 * 8; mine >= p.keys || (p.causal && mine > at + 8 * j + 2 * t + e % 2))
            s[j][e] = -INFINITY;
    for (int j = 0; j < kStep / 8; ++j) {  // P, beside the product dP
      const float4 of = statistics(j);     // lse and delta of the tile's two queries
      for (int e = 0; e < 4; ++e) s[j][e] = exp2f(fmaf(s[j][e], kLog2e * rsqrtf(float(d)), -(e % 2 ? of.z : of.x)));
    }
    pack_operand(weights, s);
    wgmma_wait<0>(dp);
    multiply_ab(dv, weights, shared.dout[n % 2]);
    for (int j = 0; j < kStep / 8; ++j) {  // dS, beside the product dV
      const float4 of = statistics(j);
      for (int e = 0; e < 4; ++e)
        dp[j][e] = unpack(weights[j / 2][j % 2 * 2 + e / 2], e % 2) * (dp[j][e] - (e % 2 ? of.w : of.y));
    }
    pack_operand(ds, dp);
    for (int m = 0; m < kStep / 4; ++m)
      *reinterpret_cast<std::uint32_t*>(shared.ds[n % 2].place(row + m % 2 * 8, m / 2 * 8 + 2 * t)) = ds[m / 4][m % 4];
    fence_async_proxy();
    if (lane == 0) bulk_wait();  // the dQ of the step before has left
    named_sync(1, 256);          // dS is complete
    wgmma_fence();               // dQ = dS K. A warpgroup has half of the queries, or half of the channels
    for (int j = 0; j < kKeys; j += 16)
      wgmma_atb(dq, descriptor(shared.ds[n % 2].at(j, d == 64 ? 64 * group : 0), 0),
                descriptor(shared.k.at(j, d == 64 ? 0 : 64 * group), 0), j > 0);
    wgmma_commit();
    multiply_ab(dk, ds, shared.q[n % 2]);
    wgmma_wait<1>(dq);
    for (int j = 0; j < 8; ++j) shared.dq[group][j][lane] = make_float4(dq[j][0], dq[j][1], dq[j][2], dq[j][3]);
    fence_async_proxy();
    named_sync(2 + group, 128);  // this warpgroup's dQ is complete
    if (lane == 0) bulk_add(&sums[at * std::size_t(d / 4) + group * 1024].x, &shared.dq[group][0][0].x, 4096);
    wgmma_wait<0>(dk);
    wgmma_wait<0>(dv);  // done; to tell the compiler
    if (threadIdx.x % 32 == 0) shared.empty[n % 2].arrive();
  }
  if (lane == 0) bulk_wait();
  const auto store = [&](half* to, const float (&from)[d / 8][4], float factor) {
    to += (std::size_t(h) * p.keys + key) * d + 2 * t;
    for (int n = 0; n < d / 4; ++n)
      if (const int r = n % 2; key + 8 * r < p.keys)
        *reinterpret_cast<std::uint32_t*>(to + r * 8 * d + n / 2 * 8) =
            pack(from[n / 2][2 * r] * factor, from[n / 2][2 * r + 1] * factor);
  };
  store(p.dk, dk, rsqrtf(float(d)));
  store(p.dv, dv, 1);
}

template <int d>
__global__ void __launch_bounds__(kThreads, 1)
    backward(AttentionOf<half> p, const float2* statistics, float4* dq, int padded, const __grid_constant__ Maps maps) {
  Shared<d>& shared = *shared_memory<Shared<d>>();
  // The longest blocks of eight heads first.
  const int h = blockIdx.y * kHeads + blockIdx.x % kHeads, key0 = blockIdx.x / kHeads * kKeys,
            begin = p.causal ? key0 : 0;
  if (h >= p.heads) return;
  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n) shared.full[n].init(1), shared.empty[n].init(8);
    shared.ready.init(1), fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 256) {
    more_registers<240>();
    consume(shared, p, dq + std::size_t(h) * padded * d / 4, h, key0, begin);
  } else {
    fewer_registers<24>();
    if (threadIdx.x > 256) return;
    shared.ready.arrive_expect(2 * shared.k.kBytes);
    shared.k.load(maps.k, shared.ready, key0, h);
    shared.v.load(maps.v, shared.ready, key0, h);
    for (int at = begin, n = 0; at < p.queries; at += kQueries<d>, ++n) {
      Barrier& full = shared.full[n % 2];
      shared.empty[n % 2].wait(n / 2 % 2 ^ 1);
      full.arrive_expect(2 * shared.q[0].kBytes + sizeof(shared.statistics[0]));
      shared.q[n % 2].load(maps.q, full, at, h);
      shared.dout[n % 2].load(maps.dout, full, at, h);
      bulk_load(shared.statistics[n % 2], statistics + h * padded + at, sizeof(shared.statistics[0]), full);
    }
  }
}

// lse in units of log2 and delta of each query; infinity and 0 for one that sees no key: exp2(S - infinity) = 0.
__global__ void find_statistics(AttentionOf<half> p, float2* statistics, int padded) {
  const int i = blockIdx.x * 8 + threadIdx.x / 32;
  const std::size_t row = std::size_t(blockIdx.y) * p.queries + i;
  float sum = 0;
  const bool sees = i < p.queries && p.lse[row] > -INFINITY;
  for (int c = threadIdx.x % 32; sees && c < p.d; c += 32)
    sum += __half2float(p.dout[row * p.d + c]) * __half2float(p.out[row * p.d + c]);
  for (int with = 16; with > 0; with /= 2) sum += __shfl_xor_sync(~0u, sum, with);
  if (threadIdx.x % 32 == 0)
    statistics[std::size_t(blockIdx.y) * padded + i] = make_float2(sees ? p.lse[row] * kLog2e : INFINITY, sum);
}

// The sums of dQ, four numbers a thread, from the order of Shared::dq.
template <int d>
__global__ void store_queries(AttentionOf<half> p, const float4* dq, int padded) {
  const int n = blockIdx.x * 256 + threadIdx.x, lane = n % 128, half_of = n / 1024 % 2 * 64;
  const int i = n / 2048 * kQueries<d> + (d == 64 ? half_of : 0) + lane / 32 * 16 + lane % 32 / 4;
  const float factor = rsqrtf(float(d));
  const float4 x = dq[std::size_t(blockIdx.y) * padded * d / 4 + n];
  const int channel = (d == 64 ? 0 : half_of) + n / 128 % 8 * 8 + n % 4 * 2;
  half* const to = p.dq + (std::size_t(blockIdx.y) * p.queries + i) * d + channel;
  if (i < p.queries) *reinterpret_cast<std::uint32_t*>(to) = pack(x.x * factor, x.y * factor);
  if (i + 8 < p.queries) *reinterpret_cast<std::uint32_t*>(to + 8 * d) = pack(x.z * factor, x.w * factor);
}

template <int d>
void launch_all(const AttentionOf<half>& p) {
  const int padded = blocks_of(p.queries, kQueries<d>) * kQueries<d>;
  const DeviceArray<float2> statistics(std::size_t(p.heads) * padded);
  const DeviceArray<float4> dq(std::size_t(p.heads) * padded * d / 4);
  dq.clear(std::size_t(p.heads) * padded * d / 4);
  launch(find_statistics, dim3(padded / 8, p.heads), 256, 0, p, statistics.data, padded);
  const auto queries = [&](const half* x) { return tensor_map(x, p.heads, p.queries, d, kQueries<d>); };
  const auto keys = [&](const half* x) { return tensor_map(x, p.heads, p.keys, d, kKeys); };
  const Maps maps = {queries(p.q), keys(p.k), keys(p.v), queries(p.dout)};
  const dim3 blocks(blocks_of(p.keys, kKeys) * kHeads, blocks_of(p.heads, kHeads));
  launch(backward<d>, blocks, kThreads, sizeof(Shared<d>), p, statistics.data, dq.data, padded, maps);
  launch(store_queries<d>, dim3(padded * d / 1024, p.heads), 256, 0, p, dq.data, padded);
}

}  // namespace

extern "C" void rung(const AttentionOf<half>* p) { p->d == 64 ? launch_all<64>(*p) : launch_all<128>(*p); }
