// Rung 16: wgmma and TMA, the tensor cores and the copies of Hopper (sm_90a).
//
// Changed: wgmma multiplies 64 rows for a warpgroup of four warps. It reads K and V, and here Q, from shared memory by
// descriptors, so no fragments are loaded at all; only P comes from registers. TMA copies a whole tile: one thread asks,
// rows beyond the sequence become zeros, and an mbarrier counts the bytes that arrive. A thread block has 128 queries,
// two warpgroups, and steps of 128 keys in two buffers. Rows are 128 bytes in the 128-byte swizzle: rung 13's exclusive or,
// made by the hardware.
// Expected: twice rung 14; mma.sync reaches little more than half of Hopper's peak. It is 1.6 to 1.7 times with 64
// channels, 2.0 to 2.2 times with 128. But all wait for each other: while a warpgroup has its softmax to do, the tensor
// cores rest.
// Measured (NVIDIA H200): d64 full 384; d64 causal 322; d128 full 508; d128 causal 422 TFLOP/s.
#include "ptx.h"

namespace {

constexpr int kQueries = 128, kKeys = 128, kThreads = 256;
constexpr float kLog2e = 1.44269504f;

struct Maps {
  CUtensorMap q, k, v;
};

// S = Q K^T, for the 64 rows of this warpgroup. Issued, not waited for.
template <int d>
__device__ __forceinline__ void scores(float (&s)[kKeys / 8][4], TmaTile<kQueries, d>& q, int row,
                                       TmaTile<kKeys, d>& k) {
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < d; c += 16) wgmma_abt(s, descriptor(q.at(row, c), 0), descriptor(k.at(0, c), 0), c > 0);
  wgmma_commit();
}

// O += P V, likewise.
template <int d>
__device__ __forceinline__ void values(float (&o)[d / 8][4], const std::uint32_t (&p)[kKeys / 16][4],
                                       TmaTile<kKeys, d>& v) {
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < kKeys / 16; ++j) wgmma_ab(o, p[j], descriptor(v.at(16 * j, 0), v.kPanel), true);
  wgmma_commit();
}

__device__ __forceinline__ void pack_weights(std::uint32_t (&p)[kKeys / 16][4], const float (&s)[kKeys / 8][4]) {
#pragma unroll
  for (int j = 0; j < kKeys / 16; ++j)
#pragma unroll
    for (int n = 0; n < 4; ++n) p[j][n] = pack(s[2 * j + n / 2][n % 2 * 2], s[2 * j + n / 2][n % 2 * 2 + 1]);
}

// i: the first of the lane's two rows.
__device__ __forceinline__ void mask(float (&s)[kKeys / 8][4], const AttentionOf<half>& p, int i, int j0) {
  if (j0 + kKeys <= p.keys && (!p.causal || j0 + kKeys <= i + 1)) return;
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int key = j0 + 8 * j + threadIdx.x % 4 * 2 + e % 2;
      if (key >= p.keys || (p.causal && key > i + e / 2 * 8)) s[j][e] = -INFINITY;
    }
}

// Joins the four lanes of a row.
template <class Join>
__device__ __forceinline__ float reduce_row(float x, const Join& join) {
  x = join(x, __shfl_xor_sync(~0u, x, 1));
  return join(x, __shfl_xor_sync(~0u, x, 2));
}

// row_max and row_sum of a lane's two rows. m is in units of the scores.
struct Rows {
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {};

  // Scores become weights, of a step more keys; o is rescaled.
  template <int tiles>
  __device__ __forceinline__ void step(float (&s)[kKeys / 8][4], float (&o)[tiles][4], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = m[r];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      largest = reduce_row(largest, [](float a, float b) { return fmaxf(a, b); });
      const float shift = largest == -INFINITY ? 0 : largest * scale_log2;  // no key yet: exp2(-infinity - 0) = 0
      const float factor = exp2f(m[r] * scale_log2 - shift);
      m[r] = largest, l[r] *= factor;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) l[r] += s[j][e] = exp2f(fmaf(s[j][e], scale_log2, -shift));
#pragma unroll
      for (int c = 0; c < tiles; ++c) o[c][2 * r] *= factor, o[c][2 * r + 1] *= factor;
    }
  }
};

template <int d>
__device__ __forceinline__ void store(const AttentionOf<half>& p, const Rows& rows, const float (&o)[d / 8][4], int i) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = reduce_row(rows.l[r], [](float a, float b) { return a + b; });
    const int t = threadIdx.x % 4;
    if (i + 8 * r >= p.queries) continue;
    const std::size_t row = std::size_t(blockIdx.y) * p.queries + i + 8 * r;
    const float inverse = sum > 0 ? 1 / sum : 0;
    if (t == 0) p.lse[row] = sum > 0 ? rows.m[r] * rsqrtf(float(d)) + log2f(sum) / kLog2e : -INFINITY;
#pragma unroll
    for (int c = 0; c < d / 8; ++c)
      *reinterpret_cast<std::uint32_t*>(p.out + row * d + 8 * c + 2 * t) =
          pack(o[c][2 * r] * inverse, o[c][2 * r + 1] * inverse);
  }
}

template <int d>
struct Shared {
  TmaTile<kQueries, d> q;
  TmaTile<kKeys, d> k[2], v[2];
  Barrier q_full, full[2];
};

template <int d>
__global__ void __launch_bounds__(kThreads) flash(AttentionOf<half> p, const __grid_constant__ Maps maps) {
  Shared<d>& shared = *shared_memory<Shared<d>>();
  const int h = blockIdx.y, i0 = (gridDim.x - 1 - blockIdx.x) * kQueries, warpgroup = threadIdx.x / 128;
  const int i = i0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // the lane's first row; the other one is i + 8
  const int keys = p.causal ? min(p.keys, i0 + kQueries) : p.keys;
  const auto load_keys = [&](int j0) {
    Barrier& full = shared.full[j0 / kKeys % 2];
    full.arrive_expect(2 * TmaTile<kKeys, d>::kBytes);
    shared.k[j0 / kKeys % 2].load(maps.k, full, j0, h);
    shared.v[j0 / kKeys % 2].load(maps.v, full, j0, h);
  };
  if (threadIdx.x == 0) {
    for (Barrier* barrier : {&shared.q_full, &shared.full[0], &shared.full[1]}) barrier->init(1);
    fence_barrier_init();
    shared.q_full.arrive_expect(shared.q.kBytes);
    shared.q.load(maps.q, shared.q_full, i0, h);
    if (keys > 0) load_keys(0);
  }
  __syncthreads();  // the barriers are there
  shared.q_full.wait(0);
  float o[d / 8][4] = {};
  Rows rows;
  for (int j0 = 0; j0 < keys; j0 += kKeys) {
    const int buffer = j0 / kKeys % 2;
    __syncthreads();  // nobody reads the other buffer any more
    if (threadIdx.x == 0 && j0 + kKeys < keys) load_keys(j0 + kKeys);
    shared.full[buffer].wait(j0 / kKeys / 2 % 2);
    float s[kKeys / 8][4];
    std::uint32_t weights[kKeys / 16][4];
    scores<d>(s, shared.q, 64 * warpgroup, shared.k[buffer]);
    wgmma_wait<0>(s);
    mask(s, p, i, j0);
    rows.step(s, o, kLog2e * rsqrtf(float(d)));
    pack_weights(weights, s);
    values<d>(o, weights, shared.v[buffer]);
    wgmma_wait<0>(o);
  }
  store<d>(p, rows, o, i);
}

}  // namespace

template <int d>
void launch_for(const AttentionOf<half>& p) {
  const Maps maps = {tensor_map(p.q, p.heads, p.queries, d, kQueries), tensor_map(p.k, p.heads, p.keys, d, kKeys),
                     tensor_map(p.v, p.heads, p.keys, d, kKeys)};
  launch(flash<d>, dim3(blocks_of(p.queries, kQueries), p.heads), kThreads, sizeof(Shared<d>), p, maps);
}

extern "C" void rung(const AttentionOf<half>* p) { p->d == 64 ? launch_for<64>(*p) : launch_for<128>(*p); }
