// Rung 23: the backward pass on tensor cores, float16.
//
// Changed: all five products are mma. Keys are rows: a warp has 16 keys and makes S^T = K Q^T and dP^T = V dO^T. P^T and
// dS^T then lie in registers as the left operands of dV += P^T dO and dK += dS^T Q want them. dQ = dS K sums over all
// keys, so dS^T goes through shared memory, where ldmatrix transposes it. It is added to float32 sums by atomicAdd,
// and a last kernel rounds them.
// Expected: ten times rung 22, bound by the atomic additions and by the waits for Q and dO. It is 6.1 to 7.6 times; how
// much of the time is whose was not profiled.
// Measured (NVIDIA H200): d64 full 124; d64 causal 119; d128 full 130; d128 causal 127 TFLOP/s.
#include "ptx.h"

namespace {

constexpr int kKeys = 64, kThreads = 128;
constexpr float kLog2e = 1.44269504f;

// Swizzled as in rung 13.
template <int rows, int columns>
struct Tile {
  __device__ __forceinline__ half* at(int row, int column) {
    return numbers + row * columns + (column / 8 ^ row % 8) * 8;
  }
  half numbers[rows * columns];
};

template <int d>
struct Shared {
  static constexpr int kQueries = d == 64 ? 64 : 32;  // of a step: registers do not suffice for more
  Tile<kKeys, d> k, v;
  Tile<kQueries, d> q, dout;
  Tile<kKeys, 64> ds;  // dS^T
  float lse[kQueries], delta[kQueries];
};

template <int rows, int d>
__device__ void load_rows(Tile<rows, d>& to, const half* from, int count) {
  for (int n = threadIdx.x; n < rows * d / 8; n += kThreads) {
    const int row = n / (d / 8), c = n % (d / 8) * 8;
    copy_async(to.at(row, c), from + (row < count ? std::size_t(row) * d + c : 0), row < count);
  }
}

// c = A B^T. 16 rows of A from `row`, both with rows of d numbers.
template <int d, int rows, int count>
__device__ __forceinline__ void multiply_abt(float (&c)[count / 8][4], Tile<rows, d>& a, int row, Tile<count, d>& b) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
#pragma unroll
  for (auto& tile : c) tile[0] = tile[1] = tile[2] = tile[3] = 0;
#pragma unroll
  for (int k = 0; k < d; k += 16) {
    std::uint32_t left[4];
    ldmatrix(left, a.at(row + lane % 16, k + lane / 16 * 8));
#pragma unroll
    for (int j = 0; j < count / 8; j += 2) {
      std::uint32_t right[4];
      ldmatrix(right, b.at(8 * (j + matrix / 2) + lane % 8, k + 8 * (matrix % 2)));
      mma(c[j], left, right[0], right[1]);
      mma(c[j + 1], left, right[2], right[3]);
    }
  }
}

// c += A B for 16 numbers of the depth: a in registers, 16 rows of B from `row`, columns from `column`.
template <int tiles, int rows, int d>
__device__ __forceinline__ void multiply_ab(float (&c)[tiles][4], const std::uint32_t (&a)[4], Tile<rows, d>& b,
                                            int row, int column) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
#pragma unroll
  for (int j = 0; j < tiles; j += 2) {
    std::uint32_t right[4];
    ldmatrix_trans(right, b.at(row + 8 * (matrix % 2) + lane % 8, column + 8 * (j + matrix / 2)));
    mma(c[j], a, right[0], right[1]);
    mma(c[j + 1], a, right[2], right[3]);
  }
}

__device__ __forceinline__ void pack_operand(std::uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack(left[0], left[1]), a[1] = pack(left[2], left[3]);
  a[2] = pack(right[0], right[1]), a[3] = pack(right[2], right[3]);
}

template <int d>
__global__ void __launch_bounds__(kThreads) backward(AttentionOf<half> p, const float* delta, float* sums) {
  constexpr int kQueries = Shared<d>::kQueries, kGroups = kQueries / 16;
  Shared<d>& shared = *shared_memory<Shared<d>>();
  const int h = blockIdx.y, j0 = blockIdx.x * kKeys, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4,
            t = threadIdx.x % 4;
  const std::size_t first_key = std::size_t(h) * p.keys + j0;
  load_rows(shared.k, p.k + first_key * d, p.keys - j0);
  load_rows(shared.v, p.v + first_key * d, p.keys - j0);
  copies_commit();
  float dk[d / 8][4] = {}, dv[d / 8][4] = {};
  for (int i0 = p.causal ? j0 : 0; i0 < p.queries; i0 += kQueries) {
    const std::size_t first = std::size_t(h) * p.queries + i0;
    load_rows(shared.q, p.q + first * d, p.queries - i0);
    load_rows(shared.dout, p.dout + first * d, p.queries - i0);
    copies_commit();
    for (int i = threadIdx.x; i < kQueries; i += kThreads) {
      const bool sees = i0 + i < p.queries && p.lse[first + i] > -INFINITY;
      shared.lse[i] = sees ? p.lse[first + i] * kLog2e : INFINITY;  // exp2(S - infinity) = 0
      shared.delta[i] = sees ? delta[first + i] : 0;
    }
    copies_wait<0>();
    __syncthreads();
    float s[kQueries / 8][4], dp[kQueries / 8][4];
    multiply_abt<d>(s, shared.k, 16 * warp, shared.q);
    multiply_abt<d>(dp, shared.v, 16 * warp, shared.dout);
#pragma unroll
    for (int n = 0; n < kQueries / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 8 * n + 2 * t + e % 2, key = j0 + 16 * warp + g + e / 2 * 8;
        const float weight = exp2f(fmaf(s[n][e], kLog2e * rsqrtf(float(d)), -shared.lse[i]));
        s[n][e] = key >= p.keys || (p.causal && key > i0 + i) ? 0 : weight;
        dp[n][e] = s[n][e] * (dp[n][e] - shared.delta[i]);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r)
        *reinterpret_cast<std::uint32_t*>(shared.ds.at(16 * warp + g + 8 * r, 8 * n) + 2 * t) =
            pack(dp[n][2 * r], dp[n][2 * r + 1]);
    }
#pragma unroll
    for (int n = 0; n < kQueries / 16; ++n) {
      std::uint32_t a[4];
      pack_operand(a, s[2 * n], s[2 * n + 1]);
      multiply_ab(dv, a, shared.dout, 16 * n, 0);
      pack_operand(a, dp[2 * n], dp[2 * n + 1]);
      multiply_ab(dk, a, shared.q, 16 * n, 0);
    }
    __syncthreads();  // dS is there; Q and dO have been read
    // A warp has 16 queries and 64 channels of dQ.
    const int row = warp % kGroups * 16, column = warp / kGroups * 64, matrix = threadIdx.x / 8 % 4;
    float dq[8][4] = {};
#pragma unroll
    for (int k = 0; k < kKeys; k += 16) {
      std::uint32_t a[4];
      ldmatrix_trans(a, shared.ds.at(k + 8 * (matrix / 2) + threadIdx.x % 8, row + 8 * (matrix % 2)));
      multiply_ab(dq, a, shared.k, k, column);
    }
#pragma unroll
    for (int c = 0; c < 8; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (const int i = row + g + e / 2 * 8; i0 + i < p.queries)
          atomicAdd(sums + (first + i) * d + column + 8 * c + 2 * t + e % 2, dq[c][e]);
  }
  copies_wait<0>();  // without any queries
  const float scale = rsqrtf(float(d));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int j = 16 * warp + g + 8 * r;
    if (j0 + j >= p.keys) continue;
#pragma unroll
    for (int c = 0; c < d / 8; ++c) {
      const std::size_t to = (first_key + j) * d + 8 * c + 2 * t;
      *reinterpret_cast<std::uint32_t*>(p.dk + to) = pack(dk[c][2 * r] * scale, dk[c][2 * r + 1] * scale);
      *reinterpret_cast<std::uint32_t*>(p.dv + to) = pack(dv[c][2 * r], dv[c][2 * r + 1]);
    }
  }
}

// A warp for each query.
__global__ void find_delta(AttentionOf<half> p, float* delta) {
  const std::size_t row = blockIdx.x * std::size_t(blockDim.x / 32) + threadIdx.x / 32;
  if (row >= std::size_t(p.heads) * p.queries) return;
  float sum = 0;
  for (int c = threadIdx.x % 32; c < p.d; c += 32)
    sum += __half2float(p.dout[row * p.d + c]) * __half2float(p.out[row * p.d + c]);
  for (int with = 16; with > 0; with /= 2) sum += __shfl_xor_sync(~0u, sum, with);
  if (threadIdx.x % 32 == 0) delta[row] = sum;
}

__global__ void round_sums(AttentionOf<half> p, const float* sums) {
  const std::size_t n = blockIdx.x * std::size_t(blockDim.x) + threadIdx.x;
  if (n < std::size_t(p.heads) * p.queries * p.d) p.dq[n] = __float2half(sums[n] * rsqrtf(float(p.d)));
}

}  // namespace

extern "C" void rung(const AttentionOf<half>* p) {
  const int rows = p->heads * p->queries;
  const DeviceArray<float> delta(rows), sums(std::size_t(rows) * p->d);
  const dim3 grid(blocks_of(p->keys, kKeys), p->heads);
  sums.clear(std::size_t(rows) * p->d);
  launch(find_delta, blocks_of(rows, 8), 256, 0, *p, delta.data);
  if (p->d == 64) launch(backward<64>, grid, kThreads, sizeof(Shared<64>), *p, delta.data, sums.data);
  if (p->d == 128) launch(backward<128>, grid, kThreads, sizeof(Shared<128>), *p, delta.data, sums.data);
  launch(round_sums, blocks_of(rows * p->d, 256), 256, 0, *p, sums.data);
}
