// Rung 13: fragments by ldmatrix, from swizzled rows.
//
// Changed: ldmatrix reads four 8 x 8 matrices for a warp: each row is 16 bytes, and the lanes get them in mma's layout,
// transposed on the way if asked (for V). Eight rows of a matrix lie a whole row of the tile apart, so they would all be
// in the same banks. So the 16 bytes number c of row r lie where number c ^ (r % 8) would: eight rows of a column then
// are in eight different groups of banks. The exclusive or is the whole swizzle; a table or padding is not needed.
// Expected: a third of the instructions for fragments and no conflicts: about twice rung 12. It is three times and a
// half at best: conflicts cost more than was thought. How much they cost of it was not profiled.
// Measured (NVIDIA H200): d64 full 190; d64 causal 165; d128 full 160; d128 causal 142 TFLOP/s.
#include "ptx.h"

namespace {

constexpr int kBlock = 64, kThreads = 128;  // queries, and keys
constexpr float kLog2e = 1.44269504f;

// kBlock rows of d numbers.
template <int d>
struct Tile {
  // Where the 16 bytes begin that hold this column, a multiple of 8.
  __device__ __forceinline__ half* at(int row, int column) { return numbers + row * d + (column / 8 ^ row % 8) * 8; }
  half numbers[kBlock * d];
};

template <int d>
struct Shared {
  Tile<d> k, v;
};

// Zeros beyond the sequence.
template <int d>
__device__ void load_rows(Tile<d>& to, const half* from, int rows) {
  for (int n = threadIdx.x; n < kBlock * d / 8; n += kThreads) {
    const int row = n / (d / 8), c = n % (d / 8) * 8;
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(to.at(row, c)) =
        row < rows ? *reinterpret_cast<const uint4*>(from + std::size_t(row) * d + c) : zeros;
  }
}

// S = Q K^T. A lane passes the address of one row of one of the four matrices.
template <int d>
__device__ __forceinline__ void scores(float (&s)[kBlock / 8][4], const std::uint32_t (&q)[d / 16][4], Tile<d>& tile) {
  const int row = threadIdx.x % 8, matrix = threadIdx.x / 8 % 4;
#pragma unroll
  for (int j = 0; j < kBlock / 8; j += 2)
#pragma unroll
    for (int c = 0; c < d / 16; ++c) {
      std::uint32_t k[4];
      ldmatrix(k, tile.at(8 * (j + matrix / 2) + row, 16 * c + 8 * (matrix % 2)));
      mma(s[j], q[c], k[0], k[1]);
      mma(s[j + 1], q[c], k[2], k[3]);
    }
}

// O += P V.
template <int d>
__device__ __forceinline__ void values(float (&o)[d / 8][4], const float (&s)[kBlock / 8][4], Tile<d>& tile) {
  const int row = threadIdx.x % 8, matrix = threadIdx.x / 8 % 4;
#pragma unroll
  for (int j = 0; j < kBlock / 16; ++j) {
    const float *left = s[2 * j], *right = s[2 * j + 1];
    const std::uint32_t weights[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]),
                                      pack(right[2], right[3])};
#pragma unroll
    for (int c = 0; c < d / 8; c += 2) {
      std::uint32_t v[4];
      ldmatrix_trans(v, tile.at(16 * j + 8 * (matrix % 2) + row, 8 * (c + matrix / 2)));
      mma(o[c], weights, v[0], v[1]);
      mma(o[c + 1], weights, v[2], v[3]);
    }
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
  __device__ __forceinline__ void step(float (&s)[kBlock / 8][4], float (&o)[tiles][4], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = m[r];
#pragma unroll
      for (int j = 0; j < kBlock / 8; ++j) largest = fmaxf(largest, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      largest = reduce_row(largest, [](float a, float b) { return fmaxf(a, b); });
      const float shift = largest == -INFINITY ? 0 : largest * scale_log2;  // no key yet: exp2(-infinity - 0) = 0
      const float factor = exp2f(m[r] * scale_log2 - shift);
      m[r] = largest, l[r] *= factor;
#pragma unroll
      for (int j = 0; j < kBlock / 8; ++j)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) l[r] += s[j][e] = exp2f(fmaf(s[j][e], scale_log2, -shift));
#pragma unroll
      for (int c = 0; c < tiles; ++c) o[c][2 * r] *= factor, o[c][2 * r + 1] *= factor;
    }
  }
};

// i: the first of the lane's two rows.
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
__global__ void __launch_bounds__(kThreads) flash(AttentionOf<half> p) {
  Shared<d>& shared = *shared_memory<Shared<d>>();
  const int h = blockIdx.y, i0 = blockIdx.x * kBlock, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int i = i0 + 16 * warp + lane / 4;  // the lane's first row; the other one is i + 8
  load_rows<d>(shared.k, p.q + (std::size_t(h) * p.queries + i0) * d, p.queries - i0);  // Q passes through K's place
  __syncthreads();
  std::uint32_t q[d / 16][4];
#pragma unroll
  for (int c = 0; c < d / 16; ++c) ldmatrix(q[c], shared.k.at(16 * warp + lane % 16, 16 * c + lane / 16 * 8));

  float o[d / 8][4] = {};
  Rows rows;
  const int keys = p.causal ? min(p.keys, i0 + kBlock) : p.keys;
  for (int j0 = 0; j0 < keys; j0 += kBlock) {
    __syncthreads();  // all have read what was there
    load_rows<d>(shared.k, p.k + (std::size_t(h) * p.keys + j0) * d, p.keys - j0);
    load_rows<d>(shared.v, p.v + (std::size_t(h) * p.keys + j0) * d, p.keys - j0);
    __syncthreads();
    float s[kBlock / 8][4] = {};
    scores<d>(s, q, shared.k);
    if (j0 + kBlock > p.keys || (p.causal && j0 + kBlock > i0)) {
#pragma unroll
      for (int j = 0; j < kBlock / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = j0 + 8 * j + lane % 4 * 2 + e % 2;
          if (key >= p.keys || (p.causal && key > i + e / 2 * 8)) s[j][e] = -INFINITY;
        }
    }
    rows.step(s, o, kLog2e * rsqrtf(float(d)));
    values<d>(o, s, shared.v);
  }
  store<d>(p, rows, o, i);
}

}  // namespace

extern "C" void rung(const AttentionOf<half>* p) {
  const dim3 grid(blocks_of(p->queries, kBlock), p->heads);
  if (p->d == 64) return launch(flash<64>, grid, kThreads, sizeof(Shared<64>), *p);
  launch(flash<128>, grid, kThreads, sizeof(Shared<128>), *p);
}
