// Rung 12: tensor cores by mma.sync, float16.
//
// Changed: both products are matrix instructions: mma multiplies 16 x 16 by 16 x 8 numbers with float32 sums, 4096
// operations for a warp in one instruction. A thread block has 64 queries, a warp 16 of them. Q, S, P and O stay in
// registers. What a lane has of S (two rows, pairs of columns) is what mma wants of P as its left operand: two results
// of 8 columns are one operand of 16, and P never goes through memory.
// Expected: many times rung 11. It is twice: fragments of K come as 4-byte reads, of V as 2-byte reads, all with bank
// conflicts: rows are 128 or 256 bytes, so a column of rows lies in one bank. Shared memory is the limit.
// Measured (NVIDIA H200): d64 full 53.1; d64 causal 45.7; d128 full 50.2; d128 causal 46 TFLOP/s.
#include "ptx.h"

namespace {

constexpr int kBlock = 64, kThreads = 128;  // queries, and keys
constexpr float kLog2e = 1.44269504f;

template <int d>
struct Shared {
  half k[kBlock][d], v[kBlock][d];
};

// Rows of d numbers, zeros beyond the sequence.
template <int d>
__device__ void load_rows(half (*to)[d], const half* from, int rows) {
  for (int n = threadIdx.x; n < kBlock * d / 8; n += kThreads) {
    const int row = n / (d / 8), c = n % (d / 8) * 8;
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(&to[row][c]) =
        row < rows ? *reinterpret_cast<const uint4*>(from + std::size_t(row) * d + c) : zeros;
  }
}

__device__ __forceinline__ std::uint32_t pair_at(const half* from) {
  return *reinterpret_cast<const std::uint32_t*>(from);
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
  const int h = blockIdx.y, i0 = blockIdx.x * kBlock, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row = threadIdx.x / 32 * 16 + g;  // of the block; the other one is row + 8
  const std::size_t first = std::size_t(h) * p.queries + i0;
  const float scale = kLog2e * rsqrtf(float(d));

  load_rows<d>(shared.k, p.q + first * d, p.queries - i0);  // Q passes through K's place
  __syncthreads();
  std::uint32_t q[d / 16][4];
#pragma unroll
  for (int c = 0; c < d / 16; ++c)
#pragma unroll
    for (int n = 0; n < 4; ++n) q[c][n] = pair_at(&shared.k[row + n % 2 * 8][16 * c + 2 * t + n / 2 * 8]);

  float o[d / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
  const int keys = p.causal ? min(p.keys, i0 + kBlock) : p.keys;
  for (int j0 = 0; j0 < keys; j0 += kBlock) {
    __syncthreads();  // all have read what was there
    load_rows<d>(shared.k, p.k + (std::size_t(h) * p.keys + j0) * d, p.keys - j0);
    load_rows<d>(shared.v, p.v + (std::size_t(h) * p.keys + j0) * d, p.keys - j0);
    __syncthreads();
    float s[kBlock / 8][4] = {};
#pragma unroll
    for (int j = 0; j < kBlock / 8; ++j)
#pragma unroll
      for (int c = 0; c < d / 16; ++c) {
        const half* k = &shared.k[8 * j + g][16 * c + 2 * t];
        mma(s[j], q[c], pair_at(k), pair_at(k + 8));
      }
    // The online softmax. Of s[j], numbers 0 and 1 are of the first row, 2 and 3 of the second.
    float largest[2] = {m[0], m[1]}, factor[2];
#pragma unroll
    for (int j = 0; j < kBlock / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = j0 + 8 * j + 2 * t + e % 2;
        const bool hidden = key >= p.keys || (p.causal && key > i0 + row + e / 2 * 8);
        s[j][e] = hidden ? -INFINITY : s[j][e] * scale;
        largest[e / 2] = fmaxf(largest[e / 2], s[j][e]);
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = reduce_row(largest[r], [](float a, float b) { return fmaxf(a, b); });
      factor[r] = largest[r] == -INFINITY ? 1 : exp2f(m[r] - largest[r]);
      m[r] = largest[r], l[r] *= factor[r];
      if (largest[r] == -INFINITY) largest[r] = 0;  // no key yet: exp2(-infinity - 0) = 0
    }
#pragma unroll
    for (int j = 0; j < kBlock / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) l[e / 2] += s[j][e] = exp2f(s[j][e] - largest[e / 2]);
#pragma unroll
    for (int c = 0; c < d / 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[c][e] *= factor[e / 2];
    // O += P V
#pragma unroll
    for (int j = 0; j < kBlock / 16; ++j) {
      const float *left = s[2 * j], *right = s[2 * j + 1];
      const std::uint32_t weights[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]),
                                        pack(right[2], right[3])};
#pragma unroll
      for (int c = 0; c < d / 8; ++c) {
        const auto v = [&](int key) {
          const half* from = &shared.v[16 * j + key][8 * c + g];
          return pack(from[0], from[d]);
        };
        mma(o[c], weights, v(2 * t), v(2 * t + 8));
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = reduce_row(l[r], [](float a, float b) { return a + b; });
    const int i = row + 8 * r;
    if (i0 + i >= p.queries) continue;
    const float inverse = sum > 0 ? 1 / sum : 0;
    if (t == 0) p.lse[first + i] = sum > 0 ? (m[r] + log2f(sum)) / kLog2e : -INFINITY;
#pragma unroll
    for (int c = 0; c < d / 8; ++c)
      *reinterpret_cast<std::uint32_t*>(p.out + (first + i) * d + 8 * c + 2 * t) =
          pack(o[c][2 * r] * inverse, o[c][2 * r + 1] * inverse);
  }
}

}  // namespace

extern "C" void rung(const AttentionOf<half>* p) {
  const dim3 grid(blocks_of(p->queries, kBlock), p->heads);
  if (p->d == 64) return launch(flash<64>, grid, kThreads, sizeof(Shared<64>), *p);
  launch(flash<128>, grid, kThreads, sizeof(Shared<128>), *p);
}
