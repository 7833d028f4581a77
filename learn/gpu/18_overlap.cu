// Rung 18: the softmax beside the products (FlashAttention-3, Shah et al. 2024; sm_90a).
//
// Changed: a warpgroup's exponentials run while the tensor cores work. Inside a warpgroup the next step's scores and this
// step's O += P V are issued together; the softmax of the scores runs beside O += P V. Two warpgroups take turns: one
// issues its products and passes the turn on by a named barrier. The other's products run during its softmax. The last
// keys come first, as they alone are masked. Eight heads' longest blocks start first: a late one would run on alone.
// Expected: a third more than rung 17. An SM makes 16 exponentials a cycle: they take half as long as the products of
// 128 channels, and as long as those of 64. It is 1.06 to 1.17 times; what the tensor pipe's other 28 % wait for is not
// known.
// Measured (NVIDIA H200): d64 full 430; d64 causal 390; d128 full 563; d128 causal 448 TFLOP/s.
#include "ptx.h"

namespace {

constexpr int kQueries = 128, kKeys = 128, kThreads = 384, kHeads = 8;
constexpr float kLog2e = 1.44269504f;

struct Maps {
  CUtensorMap q, k, v;
};

// S = Q K^T, for the 64 rows of this warpgroup. Issued, not waited for.
template <int d>
__device__ __forceinline__ void scores(float (&s)[kKeys / 8][4], TmaTile<kQueries, d>& q, int row,
                                       TmaTile<kKeys, d>& k) {
  wgmma_fence();
  for (int c = 0; c < d; c += 16) wgmma_abt(s, descriptor(q.at(row, c), 0), descriptor(k.at(0, c), 0), c > 0);
  wgmma_commit();
}

// O += P V, likewise.
template <int d>
__device__ __forceinline__ void values(float (&o)[d / 8][4], const std::uint32_t (&p)[kKeys / 16][4],
                                       TmaTile<kKeys, d>& v) {
  wgmma_fence();
  for (int j = 0; j < kKeys / 16; ++j) wgmma_ab(o, p[j], descriptor(v.at(16 * j, 0), v.kPanel), true);
  wgmma_commit();
}

__device__ __forceinline__ void pack_weights(std::uint32_t (&p)[kKeys / 16][4], const float (&s)[kKeys / 8][4]) {
  for (int j = 0; j < kKeys / 16; ++j)
    for (int n = 0; n < 4; ++n) p[j][n] = pack(s[2 * j + n / 2][n % 2 * 2], s[2 * j + n / 2][n % 2 * 2 + 1]);
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

  // Scores become weights, of a step more keys; o is to be rescaled by the factors.
  __device__ __forceinline__ void step(float (&s)[kKeys / 8][4], float (&factor)[2], float scale_log2) {
    for (int r = 0; r < 2; ++r) {
      float largest = m[r];
      for (int j = 0; j < kKeys / 8; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      largest = reduce_row(largest, [](float a, float b) { return fmaxf(a, b); });
      const float shift = largest == -INFINITY ? 0 : largest * scale_log2;  // no key yet: exp2(-infinity - 0) = 0
      factor[r] = exp2f(m[r] * scale_log2 - shift);
      m[r] = largest, l[r] *= factor[r];
      for (int j = 0; j < kKeys / 8; ++j)
        for (int e = 2 * r; e < 2 * r + 2; ++e) l[r] += s[j][e] = exp2f(fmaf(s[j][e], scale_log2, -shift));
    }
  }
};

// i: the first of the lane's two rows.
template <int d>
__device__ __forceinline__ void store(const AttentionOf<half>& p, const Rows& rows, const float (&o)[d / 8][4], int i) {
  for (int r = 0; r < 2; ++r) {
    const float sum = reduce_row(rows.l[r], [](float a, float b) { return a + b; });
    const int t = threadIdx.x % 4;
    if (i + 8 * r >= p.queries) continue;
    const std::size_t row = i + 8 * r;
    const float inverse = sum > 0 ? 1 / sum : 0;
    if (t == 0) p.lse[row] = sum > 0 ? rows.m[r] * rsqrtf(float(d)) + log2f(sum) / kLog2e : -INFINITY;
    for (int c = 0; c < d / 8; ++c)
      *reinterpret_cast<std::uint32_t*>(p.out + row * d + 8 * c + 2 * t) =
          pack(o[c][2 * r] * inverse, o[c][2 * r + 1] * inverse);
  }
}

// Two buffers of tiles, filled and emptied in turn.
template <int d>
struct Pipeline {
  __device__ __forceinline__ void init() {
    for (int n = 0; n < 2; ++n) full[n].init(1), empty[n].init(8);  // one thread; 8 consumer warps
  }
  // Buffer n % 2 is used for the time number n / 2: phases alternate.
  __device__ __forceinline__ void load(int n, const CUtensorMap& map, int row, int head) {
    empty[n % 2].wait(n / 2 % 2 ^ 1);  // of the time before; the first wait passes at once
    full[n % 2].arrive_expect(TmaTile<kKeys, d>::kBytes);
    tiles[n % 2].load(map, full[n % 2], row, head);
  }
  __device__ __forceinline__ TmaTile<kKeys, d>& wait(int n) {
    full[n % 2].wait(n / 2 % 2);
    return tiles[n % 2];
  }
  // This warp has read it.
  __device__ __forceinline__ void release(int n) {
    if (threadIdx.x % 32 == 0) empty[n % 2].arrive();
  }
  TmaTile<kKeys, d> tiles[2];
  Barrier full[2], empty[2];
};

template <int d>
struct Shared {
  TmaTile<kQueries, d> q;
  alignas(1024) Pipeline<d> k;
  alignas(1024) Pipeline<d> v;
  Barrier q_full;
};

// Whose products may be issued. 128 threads wait for the turn, the other 128 have passed it on.
__device__ __forceinline__ void wait_turn() { named_sync(1 + threadIdx.x / 128, 256); }
__device__ __forceinline__ void pass_turn() { named_arrive(2 - threadIdx.x / 128, 256); }

template <int d>
__device__ __forceinline__ void consume(Shared<d>& shared, const AttentionOf<half>& p, int i0, int keys) {
  const int i = i0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // the lane's first row; the other one is i + 8
  const int steps = blocks_of(keys, kKeys), row = threadIdx.x / 128 * 64;
  float o[d / 8][4] = {}, s[kKeys / 8][4], factor[2];
  std::uint32_t weights[kKeys / 16][4];
  Rows rows;
  const float scale_log2 = kLog2e * rsqrtf(float(d));
  shared.q_full.wait(0);
  if (steps > 0) {
    scores<d>(s, shared.q, row, shared.k.wait(0));
    wgmma_wait<0>(s);
    shared.k.release(0);
    for (int j = 0; j < kKeys / 8; ++j)
      for (int e = 0; e < 4; ++e) {
        const int key = (steps - 1) * kKeys + 8 * j + threadIdx.x % 4 * 2 + e % 2;
        if (key >= p.keys || (p.causal && key > i + e / 2 * 8)) s[j][e] = -INFINITY;
      }
    rows.step(s, factor, scale_log2);
    pack_weights(weights, s);
    if (row > 0) pass_turn();  // the first turn is the first warpgroup's
    for (int n = 1; n < steps; ++n) {
      wait_turn();
      scores<d>(s, shared.q, row, shared.k.wait(n));
      values<d>(o, weights, shared.v.wait(n - 1));
      pass_turn();
      wgmma_wait<1>(s);  // the scores are there, the values on their way
      shared.k.release(n);
      rows.step(s, factor, scale_log2);
      wgmma_wait<0>(o);
      shared.v.release(n - 1);
      for (int c = 0; c < d / 8; ++c)
        for (int e = 0; e < 4; ++e) o[c][e] *= factor[e / 2];
      pack_weights(weights, s);
    }
    if (row == 0) wait_turn();  // for every turn that is passed somebody waits
    values<d>(o, weights, shared.v.wait(steps - 1));
    wgmma_wait<0>(o);
  }
  store<d>(p, rows, o, i);
}

template <int d>
__global__ void __launch_bounds__(kThreads, 1) flash(AttentionOf<half> p, const __grid_constant__ Maps maps) {
  Shared<d>& shared = *shared_memory<Shared<d>>();
  const int h = blockIdx.y * kHeads + blockIdx.x % kHeads, i0 = (gridDim.x - 1 - blockIdx.x) / kHeads * kQueries;
  if (h >= p.heads) return;
  const int keys = p.causal ? min(p.keys, i0 + kQueries) : p.keys;
  if (threadIdx.x == 0) shared.q_full.init(1), shared.k.init(), shared.v.init(), fence_barrier_init();
  __syncthreads();  // the barriers are there
  if (threadIdx.x < 256) {
    more_registers<240>();
    p.out += std::size_t(h) * p.queries * d, p.lse += std::size_t(h) * p.queries;
    consume(shared, p, i0, keys);
  } else {
    fewer_registers<24>();
    if (threadIdx.x > 256) return;
    shared.q_full.arrive_expect(shared.q.kBytes);
    shared.q.load(maps.q, shared.q_full, i0, h);
    for (int n = 0, j0 = (blocks_of(keys, kKeys) - 1) * kKeys; j0 >= 0; ++n, j0 -= kKeys) {
      shared.k.load(n, maps.k, j0, h);
      shared.v.load(n, maps.v, j0, h);
    }
  }
}

}  // namespace

template <int d>
void launch_for(const AttentionOf<half>& p) {
  const Maps maps = {tensor_map(p.q, p.heads, p.queries, d, kQueries), tensor_map(p.k, p.heads, p.keys, d, kKeys),
                     tensor_map(p.v, p.heads, p.keys, d, kKeys)};
  launch(flash<d>, dim3(blocks_of(p.queries, kQueries) * kHeads, blocks_of(p.heads, kHeads)), kThreads,
         sizeof(Shared<d>), p, maps);
}

extern "C" void rung(const AttentionOf<half>* p) { p->d == 64 ? launch_for<64>(*p) : launch_for<128>(*p); }
