// Rung 3: a register tile of C stays in registers while the whole depth passes by.
//
// Changed: kRows x kColumns sums are local variables. A step of the depth loads kColumns numbers of B and kRows of A,
// and makes kRows * kColumns multiply-adds: rung 2 made one for two loads and a store. kRows * kColumns / 16 = 16
// vectors of 16 sums do not wait for each other, which hides the multiply-add's four cycles. B is copied into panels of
// kColumns columns first, so that the depth is walked in the order of memory.
// Expected: near the processor's peak.
// Every kernel of this library is this loop, with something between two of them.
// Measured (AMD EPYC, 2 threads, Zen 5): 250 GFLOP/s.
#include <algorithm>
#include <vector>

#include "../rung.h"

namespace {

constexpr int kRows = 8, kColumns = 32;

// A register tile of C. a: its first row, b: a panel, (depth, kColumns).
template <int rows>
void register_tile(const Matmul& p, int i, int j, const float* b) {
  float sum[rows][kColumns] = {};
  for (int l = 0; l < p.depth; ++l)
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < kColumns; ++c) sum[r][c] += p.a[(i + r) * p.depth + l] * b[l * kColumns + c];
  const int columns = std::min(kColumns, p.columns - j);
  for (int r = 0; r < rows; ++r) std::copy(sum[r], sum[r] + columns, p.c + (i + r) * p.columns + j);
}

}  // namespace

extern "C" void rung(const Matmul* p) {
  std::vector<float> panel(std::size_t(p->depth) * kColumns);
  for (int j = 0; j < p->columns; j += kColumns) {
    const int columns = std::min(kColumns, p->columns - j);
    for (int l = 0; l < p->depth; ++l) std::copy_n(p->b + l * p->columns + j, columns, panel.data() + l * kColumns);
    int i = 0;
    for (; i + kRows <= p->rows; i += kRows) register_tile<kRows>(*p, i, j, panel.data());
    for (; i < p->rows; ++i) register_tile<1>(*p, i, j, panel.data());
  }
}
