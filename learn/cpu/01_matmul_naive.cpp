// Rung 1: C = A B in three loops, as the formula says.
//
// The inner loop walks down a column of B: each step touches another cache line, and the sum is one long chain of
// additions, each of which waits for the one before.
// Measured (AMD EPYC, 2 threads, Zen 5): 0.619 GFLOP/s.
#include "../rung.h"

extern "C" void rung(const Matmul* p) {
  for (int i = 0; i < p->rows; ++i)
    for (int j = 0; j < p->columns; ++j) {
      float sum = 0;
      for (int l = 0; l < p->depth; ++l) sum += p->a[i * p->depth + l] * p->b[l * p->columns + j];
      p->c[i * p->columns + j] = sum;
    }
}
