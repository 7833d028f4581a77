// Rung 17: a producer warpgroup and two consumer warpgroups (sm_90a).
//
// Changed: a third warpgroup does nothing but ask TMA for tiles: one of its threads. Two mbarriers a buffer are the whole
// protocol: `full` ends a phase when the bytes are there, `empty` when all consumer warps have read them. Consumers
// no longer wait for each other, and nobody waits at __syncthreads. setmaxnreg takes registers from the producer (24
// remain) and gives them to the consumers (240).
// Expected: a third more than rung 16. A warpgroup's softmax now falls beside the other's products, if by chance. It is
// 0.95 to 1.08 times: chance does little. Probably both warpgroups want the tensor cores, then the exponentials, at once.
// With 128 channels, causal, runs on the same kind of card differ most: 388 to 432 TFLOP/s. Why is not known.
// Measured (NVIDIA H200): d64 full 400; d64 causal 334; d128 full 530; d128 causal 408 TFLOP/s.
#include "ptx.h"

namespace {

constexpr int kQueries = 128, kKeys = 128, kThreads = 384;
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

// i: the first of the lane's two rows.
__device__ __forceinline__ void mask(float (&s)[kKeys / 8][4], const AttentionOf<half>& p, int i, int j0) {
  if (j0 + kKeys <= p.keys && (!p.causal || j0 + kKeys <= i + 1)) return;
  for (int j = 0; j < kKeys / 8; ++j)
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
    for (int r = 0; r < 2; ++r) {
      float largest = m[r];
      for (int j = 0; j < kKeys / 8; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      largest = reduce_row(largest, [](float a, float b) { return fmaxf(a, b); });
      const float shift = largest == -INFINITY ? 0 : largest * scale_log2;  // no key yet: exp2(-infinity - 0) = 0
      const float factor = exp2f(m[r] * scale_log2 - shift);
      m[r] = largest, l[r] *= factor;
      for (int j = 0; j < kKeys / 8; ++j)
        for (int e = 2 * r; e < 2 * r + 2; ++e) l[r] += s[j][e] = exp2f(fmaf(s[j][e], scale_log2, -shift));
      for (int c = 0; c < tiles; ++c) o[c][2 * r] *= factor, o[c][2 * r + 1] *= factor;
    }
  }
};

template <int d>
__device__ __forceinline__ void store(const AttentionOf<half>& p, const Rows& rows, const float (&o)[d / 8][4], int i) {
  for (int r = 0; r < 2; ++r) {
    const float sum = reduce_row(rows.l[r], [](float a, float b) { return a + b; });
    const int t = threadIdx.x % 4;
    if (i + 8 * r >= p.queries) continue;
    const std::size_t row = std::size_t(blockIdx.y) * p.queries + i + 8 * r;
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

template <int d>
__device__ __forceinline__ void consume(Shared<d>& shared, const AttentionOf<half>& p, int i0, int keys) {
  const int i = i0 + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // the lane's first row; the other one is i + 8
  float o[d / 8][4] = {}, s[kKeys / 8][4];
  std::uint32_t weights[kKeys / 16][4];
  Rows rows;
  shared.q_full.wait(0);
  for (int n = 0; n * kKeys < keys; ++n) {
    scores<d>(s, shared.q, threadIdx.x / 128 * 64, shared.k.wait(n));
    wgmma_wait<0>(s);
    shared.k.release(n);
    mask(s, p, i, n * kKeys);
    rows.step(s, o, kLog2e * rsqrtf(float(d)));
    pack_weights(weights, s);
    values<d>(o, weights, shared.v.wait(n));
    wgmma_wait<0>(o);
    shared.v.release(n);
  }
  store<d>(p, rows, o, i);
}

template <int d>
__global__ void __launch_bounds__(kThreads, 1) flash(AttentionOf<half> p, const __grid_constant__ Maps maps) {
  Shared<d>& shared = *shared_memory<Shared<d>>();
  const int i0 = (gridDim.x - 1 - blockIdx.x) * kQueries;
  const int keys = p.causal ? min(p.keys, i0 + kQueries) : p.keys;
  if (threadIdx.x == 0) shared.q_full.init(1), shared.k.init(), shared.v.init(), fence_barrier_init();
  __syncthreads();  // the barriers are there
  if (threadIdx.x < 256) {
    more_registers<240>();
    consume(shared, p, i0, keys);
  } else {
    fewer_registers<24>();
    if (threadIdx.x > 256) return;
    shared.q_full.arrive_expect(shared.q.kBytes);
    shared.q.load(maps.q, shared.q_full, i0, blockIdx.y);
    for (int n = 0; n * kKeys < keys; ++n) {
      shared.k.load(n, maps.k, n * kKeys, blockIdx.y);
      shared.v.load(n, maps.v, n * kKeys, blockIdx.y);
    }
  }
}

}  // namespace

template <int d>
void launch_for(const AttentionOf<half>& p) {
  const Maps maps = {tensor_map(p.q, p.heads, p.queries, d, kQueries), tensor_map(p.k, p.heads, p.keys, d, kKeys),
                     tensor_map(p.v, p.heads, p.keys, d, kKeys)};
  launch(flash<d>, dim3(blocks_of(p.queries, kQueries), p.heads), kThreads, sizeof(Shared<d>), p, maps);
}

extern "C" void rung(const AttentionOf<half>* p) { p->d == 64 ? launch_for<64>(*p) : launch_for<128>(*p); }
