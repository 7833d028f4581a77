// Rung 11: FlashAttention-2's loops (Dao, 2023) on plain multiply-adds.
//
// Changed: query blocks outside, and a thread block for each: 64 times as many thread blocks. O, m and l stay in
// registers and are written once, with one division at the end. Products are rung 3's register tiles: 256 threads are
// 16 x 16, a thread has 4 x 4 scores and, of the same 4 rows, up to 8 channels of O. The 16 threads of a row are half a
// warp, so row_max and row_sum are shuffles. K lies transposed in shared memory, and P goes through it, for the second
// product.
// Expected: many times rung 10, at a good part of what float32 multiply-adds allow.
// Measured (NVIDIA H200): d64 full 26.1; d64 causal 22.7; d128 full 25.2; d128 causal 22.5 TFLOP/s.
#include "device.h"

namespace {

constexpr int kBlock = 64, kThreads = 256, kPad = kBlock + 4;  // queries, and keys
constexpr float kLog2e = 1.44269504f;

// d: channels rounded up to 64 or 128.
template <int d>
struct Shared {
  float q[d][kPad];  // transposed
  float k[d][kPad];  // transposed; later P^T (keys, queries)
  float v[kBlock][d];
};

template <int d>
__device__ void load_transposed(float (*to)[kPad], const float* from, int rows, int channels) {
  for (int n = threadIdx.x; n < kBlock * d; n += kThreads) {
    const int row = n / d, c = n % d;
    to[c][row] = row < rows && c < channels ? from[std::size_t(row) * channels + c] : 0;
  }
}

// Four neighbouring numbers.
__device__ __forceinline__ void read_four(float* to, const float* from) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
}

template <class Join>
__device__ __forceinline__ float reduce_row(float x, const Join& join) {
  for (int with = 8; with > 0; with /= 2) x = join(x, __shfl_xor_sync(~0u, x, with));
  return x;
}

template <int d>
__global__ void __launch_bounds__(kThreads) flash(Attention p) {
  Shared<d>& shared = *shared_memory<Shared<d>>();
  const int h = blockIdx.y, i0 = blockIdx.x * kBlock, x = threadIdx.x % 16, y = threadIdx.x / 16 * 4;
  const std::size_t first = std::size_t(h) * p.queries + i0;
  const float scale = kLog2e * rsqrtf(float(p.d));
  load_transposed<d>(shared.q, p.q + first * p.d, p.queries - i0, p.d);
  float o[4][d / 16] = {}, m[4], l[4] = {};
  for (float& largest : m) largest = -INFINITY;
  const int keys = p.causal ? min(p.keys, i0 + kBlock) : p.keys;
  for (int j0 = 0; j0 < keys; j0 += kBlock) {
    __syncthreads();
    const float* v = p.v + (std::size_t(h) * p.keys + j0) * p.d;
    load_transposed<d>(shared.k, p.k + (std::size_t(h) * p.keys + j0) * p.d, p.keys - j0, p.d);
    for (int n = threadIdx.x; n < kBlock * d; n += kThreads) {
      const int row = n / d, c = n % d;
      shared.v[row][c] = j0 + row < p.keys && c < p.d ? v[std::size_t(row) * p.d + c] : 0;
    }
    __syncthreads();
    float s[4][4] = {};
    for (int c = 0; c < d; ++c) {
      __align__(16) float q[4], k[4];
      read_four(q, &shared.q[c][y]), read_four(k, &shared.k[c][4 * x]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) s[i][j] += q[i] * k[j];
    }
    __syncthreads();  // K has been read
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float largest = m[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = j0 + 4 * x + j;
        s[i][j] = key >= p.keys || (p.causal && key > i0 + y + i) ? -INFINITY : s[i][j] * scale;
        largest = fmaxf(largest, s[i][j]);
      }
      largest = reduce_row(largest, [](float a, float b) { return fmaxf(a, b); });
      const float shift = largest == -INFINITY ? 0 : largest, factor = exp2f(m[i] - shift);
      m[i] = largest, l[i] *= factor;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float weight = exp2f(s[i][j] - shift);
        l[i] += weight, shared.k[4 * x + j][y + i] = weight;
      }
#pragma unroll
      for (int c = 0; c < d / 16; ++c) o[i][c] *= factor;
    }
    __syncthreads();  // P is there
    for (int j = 0; j < kBlock; ++j) {
      __align__(16) float weight[4], v[4];
      read_four(weight, &shared.k[j][y]);
#pragma unroll
      for (int part = 0; part < d / 64; ++part) {
        read_four(v, &shared.v[j][64 * part + 4 * x]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) o[i][4 * part + c] += weight[i] * v[c];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sum = reduce_row(l[i], [](float a, float b) { return a + b; });
    if (i0 + y + i >= p.queries) continue;
    const std::size_t row = first + y + i;
    if (x == 0) p.lse[row] = sum > 0 ? (m[i] + log2f(sum)) / kLog2e : -INFINITY;
    for (int c = 0; c < d / 16; ++c)
      if (const int channel = c / 4 * 64 + 4 * x + c % 4; channel < p.d)
        p.out[row * p.d + channel] = sum > 0 ? o[i][c] / sum : 0;
  }
}

}  // namespace

extern "C" void rung(const Attention* p) {
  const dim3 grid(blocks_of(p->queries, kBlock), p->heads);
  if (p->d <= 64) return launch(flash<64>, grid, kThreads, sizeof(Shared<64>), *p);
  launch(flash<128>, grid, kThreads, sizeof(Shared<128>), *p);
}
