// Rung 1: C = A B, a thread for each number of C.
//
// Neighbouring threads make neighbouring columns, so that a warp reads 32 numbers of B that follow each other (one
// memory transaction), and one number of A that all share.
// Expected: a few percent of the peak; it is 9 %. Each multiply-add reads two numbers through the L1 cache, which
// delivers far fewer than the multipliers take.
// Measured (NVIDIA H200): 5.89 TFLOP/s.
#include "device.h"

namespace {

__global__ void multiply(Matmul p) {
  const int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= p.rows || column >= p.columns) return;
  float sum = 0;
  for (int l = 0; l < p.depth; ++l)
    sum += p.a[std::size_t(row) * p.depth + l] * p.b[std::size_t(l) * p.columns + column];
  p.c[std::size_t(row) * p.columns + column] = sum;
}

}  // namespace

extern "C" void rung(const Matmul* p) {
  launch(multiply, dim3(blocks_of(p->columns, 32), blocks_of(p->rows, 8)), dim3(32, 8), 0, *p);
}
