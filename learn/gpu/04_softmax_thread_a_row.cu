// Rung 4: the safe softmax, a thread for each row.
//
// Three passes over a row: the maximum, the sum, the quotients. It is the CPU's rung 4 with rows in parallel.
// Expected: slow, for two reasons. Neighbouring threads read addresses a whole row apart, so each of a warp's 32 reads
// is a memory transaction of its own. And 1024 rows are 1024 threads, of the hundred thousand or more that a GPU wants.
// Measured (NVIDIA H200): 1024 x 1024 292; 4096 x 4096 1270 us.
#include "device.h"

namespace {

__global__ void softmax(Softmax p) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= p.rows) return;
  const float* x = p.x + std::size_t(row) * p.columns;
  float* y = p.y + std::size_t(row) * p.columns;
  float largest = -INFINITY, sum = 0;
  for (int j = 0; j < p.columns; ++j) largest = fmaxf(largest, x[j]);
  for (int j = 0; j < p.columns; ++j) sum += expf(x[j] - largest);
  for (int j = 0; j < p.columns; ++j) y[j] = expf(x[j] - largest) / sum;
}

}  // namespace

extern "C" void rung(const Softmax* p) { launch(softmax, blocks_of(p->rows, 128), 128, 0, *p); }
