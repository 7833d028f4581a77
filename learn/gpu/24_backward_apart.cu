// Rung 24: dK, dV and dQ apart: no atomic additions.
//
// Changed: two kernels, of one template. In the first a thread block keeps 64 keys and walks the queries, for dK and dV;
// in the second it keeps 64 queries and walks the keys, for dQ. The side that stays makes the rows of S, or of S^T, so
// that dS lies in registers as the next product wants it. S and dP are made twice: seven products in the place of five.
// In return nothing is added in global memory, no float32 sums exist, and the same call gives the same bits.
// The next step's tiles arrive by cp.async while this one's are multiplied.
// Expected: faster than rung 23 where its atomic additions are the limit; by 7 / 5 slower where tensor cores are.
// Measured (NVIDIA H200): d64 full 144; d64 causal 129; d128 full 158; d128 causal 142 TFLOP/s.
#include "ptx.h"

namespace {

constexpr int kRows = 64, kThreads = 128;  // kRows: of the side that stays
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
  static constexpr int kStep = d == 64 ? 64 : 32;  // of the side that is walked
  Tile<kRows, d> a, b;                             // K and V, or Q and dO
  Tile<kStep, d> c[2], e[2];                       // Q and dO, or K and V; two buffers
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

// lse in units of log2, infinity for a query that sees no key or does not exist: exp2(S - infinity) = 0.
__device__ __forceinline__ float lse_of(const AttentionOf<half>& p, int i) {
  const float lse = i < p.queries ? p.lse[std::size_t(blockIdx.y) * p.queries + i] : -INFINITY;
  return lse > -INFINITY ? lse * kLog2e : INFINITY;
}

template <int d, bool of_keys>
__global__ void __launch_bounds__(kThreads) backward(AttentionOf<half> p, const float* all_delta) {
  constexpr int kStep = Shared<d>::kStep;
  Shared<d>& shared = *shared_memory<Shared<d>>();
  const int h = blockIdx.y, row0 = blockIdx.x * kRows, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4,
            t = threadIdx.x % 4;
  const int rows = of_keys ? p.keys : p.queries, columns = of_keys ? p.queries : p.keys;
  const std::size_t first_row = std::size_t(h) * rows, first_column = std::size_t(h) * columns;
  const half *c = of_keys ? p.q : p.k, *e = of_keys ? p.dout : p.v;
  const float* delta = all_delta + std::size_t(h) * p.queries;
  // Causal: keys are seen by queries from row0 on, queries see keys up to their last.
  const int begin = p.causal && of_keys ? row0 : 0;
  const int end = p.causal && !of_keys ? min(columns, row0 + kRows) : columns;
  const auto copy_step = [&](int at) {
    const int buffer = (at - begin) / kStep % 2;
    load_rows(shared.c[buffer], c + (first_column + at) * d, columns - at);
    load_rows(shared.e[buffer], e + (first_column + at) * d, columns - at);
    copies_commit();
  };
  load_rows(shared.a, (of_keys ? p.k : p.q) + (first_row + row0) * d, rows - row0);
  load_rows(shared.b, (of_keys ? p.v : p.dout) + (first_row + row0) * d, rows - row0);
  if (begin < end) copy_step(begin);
  float first[d / 8][4] = {}, second[of_keys ? d / 8 : 1][4] = {};  // dK and dV, or dQ
  for (int at = begin; at < end; at += kStep) {
    const int buffer = (at - begin) / kStep % 2;
    copies_wait<0>();
    __syncthreads();
    if (at + kStep < end) copy_step(at + kStep);
    float s[kStep / 8][4], dp[kStep / 8][4];
    multiply_abt<d>(s, shared.a, 16 * warp, shared.c[buffer]);
    multiply_abt<d>(dp, shared.b, 16 * warp, shared.e[buffer]);
#pragma unroll
    for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int row = row0 + 16 * warp + g + m / 2 * 8, column = at + 8 * n + 2 * t + m % 2;
        const int i = of_keys ? column : row, j = of_keys ? row : column;
        const float weight = exp2f(fmaf(s[n][m], kLog2e * rsqrtf(float(d)), -lse_of(p, i)));
        s[n][m] = j >= p.keys || (p.causal && j > i) ? 0 : weight;
        dp[n][m] = s[n][m] * (dp[n][m] - (i < p.queries ? delta[i] : 0));
      }
#pragma unroll
    for (int n = 0; n < kStep / 16; ++n) {
      std::uint32_t a[4];
      pack_operand(a, dp[2 * n], dp[2 * n + 1]);
      multiply_ab(first, a, shared.c[buffer], 16 * n, 0);
      if constexpr (of_keys) {
        pack_operand(a, s[2 * n], s[2 * n + 1]);
        multiply_ab(second, a, shared.e[buffer], 16 * n, 0);
      }
    }
  }
  copies_commit(), copies_wait<0>();  // without any step
  const auto store = [&](half* to, const auto& from, float factor) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (const int row = row0 + 16 * warp + g + 8 * r; row < rows)
#pragma unroll
        for (int n = 0; n < d / 8; ++n)
          *reinterpret_cast<std::uint32_t*>(to + (first_row + row) * d + 8 * n + 2 * t) =
              pack(from[n][2 * r] * factor, from[n][2 * r + 1] * factor);
  };
  store(of_keys ? p.dk : p.dq, first, rsqrtf(float(d)));
  if constexpr (of_keys) store(p.dv, second, 1);
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

template <int d>
void launch_both(const AttentionOf<half>& p) {
  const int rows = p.heads * p.queries;
  const DeviceArray<float> delta(rows);
  launch(find_delta, blocks_of(rows, 8), 256, 0, p, delta.data);
  const dim3 keys(blocks_of(p.keys, kRows), p.heads), queries(blocks_of(p.queries, kRows), p.heads);
  launch(backward<d, true>, keys, kThreads, sizeof(Shared<d>), p, delta.data);
  launch(backward<d, false>, queries, kThreads, sizeof(Shared<d>), p, delta.data);
}

}  // namespace

extern "C" void rung(const AttentionOf<half>* p) { p->d == 64 ? launch_both<64>(*p) : launch_both<128>(*p); }
