// Rung 2: tiles of A and B in shared memory.
//
// Changed: a thread block makes 32 x 32 numbers of C. It loads 32 x 32 numbers of A and of B, waits until all threads
// have done so, multiplies, waits again, and goes on. Each number is loaded once by the block and used 32 times.
// Expected: two to three times faster. Now shared memory is the limit: still two reads for each multiply-add. It is 1.5
// times: the unit of shared memory and L1 works at 89 % (learn/profiling.md). Rung 1 reads through the same unit.
// Measured (NVIDIA H200): 8.67 TFLOP/s.
#include "device.h"

namespace {

constexpr int kTile = 32;

__global__ void multiply(Matmul p) {
  __shared__ float a[kTile][kTile], b[kTile][kTile];
  const int x = threadIdx.x, y = threadIdx.y;
  const int row = blockIdx.y * kTile + y, column = blockIdx.x * kTile + x;
  float sum = 0;
  for (int l0 = 0; l0 < p.depth; l0 += kTile) {
    const bool in_a = row < p.rows && l0 + x < p.depth, in_b = l0 + y < p.depth && column < p.columns;
    a[y][x] = in_a ? p.a[std::size_t(row) * p.depth + l0 + x] : 0;
    b[y][x] = in_b ? p.b[std::size_t(l0 + y) * p.columns + column] : 0;
    __syncthreads();  // the tiles are complete
#pragma unroll
    for (int l = 0; l < kTile; ++l) sum += a[y][l] * b[l][x];
    __syncthreads();  // nobody reads them any more
  }
  if (row < p.rows && column < p.columns) p.c[std::size_t(row) * p.columns + column] = sum;
}

}  // namespace

extern "C" void rung(const Matmul* p) {
  launch(multiply, dim3(blocks_of(p->columns, kTile), blocks_of(p->rows, kTile)), dim3(kTile, kTile), 0, *p);
}
