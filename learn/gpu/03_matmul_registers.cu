// Rung 3: 8 x 8 numbers of C in the registers of each thread.
//
// Changed: a thread block makes 128 x 128 numbers with 256 threads. For each step of the depth a thread reads 8 numbers
// of A and 8 of B and makes 64 multiply-adds: a quarter of a read for each, where rung 2 has two. Reads are 16 bytes
// wide. A lies transposed in shared memory, so that a thread's rows follow each other. A thread's columns are two groups
// of four, 64 apart: then the threads of a warp read neighbouring groups, without bank conflicts. The next tile is on
// its way from global memory into registers while this one is multiplied.
// Expected: most of cuBLAS in float32. What is left is the order of instructions, which cuBLAS chooses by hand.
// Measured (NVIDIA H200): 40.4 TFLOP/s.
#include "device.h"

namespace {

constexpr int kTile = 128, kDepth = 8, kThreads = 256;

// Four numbers of a row, zeros beyond the matrix.
__device__ __forceinline__ float4 load_four(const float* matrix, int rows, int columns, int row, int column) {
  const float* from = matrix + std::size_t(row) * columns + column;
  if (row < rows && column + 3 < columns && columns % 4 == 0) return *reinterpret_cast<const float4*>(from);
  const auto number = [&](int n) { return row < rows && column + n < columns ? from[n] : 0.0f; };
  return make_float4(number(0), number(1), number(2), number(3));
}

__global__ void __launch_bounds__(kThreads) multiply(Matmul p) {
  __shared__ __align__(16) float a[2][kDepth][kTile], b[2][kDepth][kTile];
  const int thread = threadIdx.x, x = thread % 16 * 4, y = thread / 16 * 4;  // and 64 further
  const int row0 = blockIdx.y * kTile, column0 = blockIdx.x * kTile;
  const int a_row = thread / 2, a_column = thread % 2 * 4, b_row = thread / 32, b_column = thread % 32 * 4;
  float sum[8][8] = {};
  float4 next_a, next_b;
  const auto load = [&](int l0) {
    next_a = load_four(p.a, p.rows, p.depth, row0 + a_row, l0 + a_column);
    next_b = load_four(p.b, p.depth, p.columns, l0 + b_row, column0 + b_column);
  };
  const auto store = [&](int buffer) {
    a[buffer][a_column][a_row] = next_a.x, a[buffer][a_column + 1][a_row] = next_a.y;
    a[buffer][a_column + 2][a_row] = next_a.z, a[buffer][a_column + 3][a_row] = next_a.w;
    *reinterpret_cast<float4*>(&b[buffer][b_row][b_column]) = next_b;
  };
  load(0);
  store(0);
  __syncthreads();
  for (int l0 = 0, buffer = 0; l0 < p.depth; l0 += kDepth, buffer ^= 1) {
    const bool more = l0 + kDepth < p.depth;
    if (more) load(l0 + kDepth);
#pragma unroll
    for (int l = 0; l < kDepth; ++l) {
      __align__(16) float left[8], right[8];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        *reinterpret_cast<float4*>(left + 4 * part) = *reinterpret_cast<const float4*>(&a[buffer][l][y + 64 * part]);
        *reinterpret_cast<float4*>(right + 4 * part) = *reinterpret_cast<const float4*>(&b[buffer][l][x + 64 * part]);
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] += left[i] * right[j];
    }
    if (more) store(buffer ^ 1);  // the other buffer was last read before the barrier of the step before
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int row = row0 + y + i % 4 + 64 * (i / 4), column = column0 + x + 64 * part;
      float* to = p.c + std::size_t(row) * p.columns + column;
      const float* from = sum[i] + 4 * part;
      if (row < p.rows && column + 3 < p.columns && p.columns % 4 == 0) {
        *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
      } else if (row < p.rows) {
        for (int n = 0; n < 4 && column + n < p.columns; ++n) to[n] = from[n];
      }
    }
}

}  // namespace

extern "C" void rung(const Matmul* p) {
  launch(multiply, dim3(blocks_of(p->columns, kTile), blocks_of(p->rows, kTile)), dim3(kThreads), 0, *p);
}
