// Rung 10: FlashAttention-1's loops (Dao et al., 2022, algorithm 1) on plain multiply-adds.
//
// Changed: no S in global memory. A thread block has one head. Outside it walks blocks of 32 keys, which it puts into
// shared memory; inside it walks blocks of 32 queries. O, m and l of a query block wait in global memory: they are read,
// rescaled, divided and written for each key block.
// A warp makes 4 rows of S. A lane has one key for the scores, and every 32nd channel for the values.
// Expected: several times faster than the textbook on long sequences, but only as many thread blocks as heads: with few
// heads most of the GPU waits. So it is: 32 heads are a quarter of the SMs. Without a mask the textbook is 1.02 to 1.09
// times as fast.
// Measured (NVIDIA H200): d64 full 0.781; d64 causal 0.838; d128 full 0.897; d128 causal 0.907 TFLOP/s.
#include "device.h"

namespace {

constexpr int kKeys = 32, kQueries = 32, kThreads = 256, kRows = kQueries / (kThreads / 32), kMost = 128;  // channels

__device__ __forceinline__ float warp_max(float x) {
  for (int with = 16; with > 0; with /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, with));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
  for (int with = 16; with > 0; with /= 2) x += __shfl_xor_sync(~0u, x, with);
  return x;
}

// One row of up to kMost channels and a float more, so that the rows of a column lie in different banks.
struct Shared {
  float q[kQueries][kMost + 1], k[kKeys][kMost + 1], v[kKeys][kMost + 1], p[kQueries][kKeys];
};

__device__ void load_rows(float (*to)[kMost + 1], const float* from, int rows, int d) {
  for (int n = threadIdx.x; n < 32 * d; n += kThreads) to[n / d][n % d] = n / d < rows ? from[n] : 0;
}

__global__ void __launch_bounds__(kThreads) flash(Attention p, float* all_m, float* all_l) {
  Shared& shared = *shared_memory<Shared>();
  const int h = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, d = p.d;
  float *m = all_m + std::size_t(h) * p.queries, *l = all_l + std::size_t(h) * p.queries;
  float* out = p.out + std::size_t(h) * p.queries * d;
  for (int n = threadIdx.x; n < p.queries * d; n += kThreads) out[n] = 0;
  for (int i = threadIdx.x; i < p.queries; i += kThreads) m[i] = -INFINITY, l[i] = 0;
  for (int j0 = 0; j0 < p.keys; j0 += kKeys) {
    __syncthreads();
    load_rows(shared.k, p.k + (std::size_t(h) * p.keys + j0) * d, p.keys - j0, d);
    load_rows(shared.v, p.v + (std::size_t(h) * p.keys + j0) * d, p.keys - j0, d);
    for (int i0 = p.causal ? j0 / kQueries * kQueries : 0; i0 < p.queries; i0 += kQueries) {
      __syncthreads();
      load_rows(shared.q, p.q + (std::size_t(h) * p.queries + i0) * d, p.queries - i0, d);
      __syncthreads();
      for (int r = warp * kRows; r < warp * kRows + kRows && i0 + r < p.queries; ++r) {
        const int i = i0 + r, j = j0 + lane;
        float s = 0;
        for (int c = 0; c < d; ++c) s += shared.q[r][c] * shared.k[lane][c];
        s = j >= p.keys || (p.causal && j > i) ? -INFINITY : s * rsqrtf(float(d));
        const float before = m[i], now = fmaxf(before, warp_max(s));
        if (now == -INFINITY) continue;
        const float weight = expf(s - now), kept = l[i] * expf(before - now), sum = kept + warp_sum(weight);
        __syncwarp();  // all lanes have read m and l
        shared.p[r][lane] = weight;
        if (lane == 0) m[i] = now, l[i] = sum;
        __syncwarp();
        for (int c = lane; c < d; c += 32) {
          float o = out[std::size_t(i) * d + c] * kept;
          for (int key = 0; key < kKeys; ++key) o += shared.p[r][key] * shared.v[key][c];
          out[std::size_t(i) * d + c] = o / sum;
        }
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.queries; i += kThreads)
    p.lse[std::size_t(h) * p.queries + i] = l[i] > 0 ? m[i] + logf(l[i]) : -INFINITY;
}

}  // namespace

extern "C" void rung(const Attention* p) {
  const DeviceArray<float> m(std::size_t(p->heads) * p->queries), l(std::size_t(p -> heads) * p->queries);
  launch(flash, p->heads, kThreads, sizeof(Shared), *p, m.data, l.data);
}
