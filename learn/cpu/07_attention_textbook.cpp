// Rung 7: textbook attention: S = Q K^T, P = softmax(S), O = P V, one after the other.
//
// Three loops that everybody can check. S and P are queries x keys numbers: at 64k tokens 16 GiB for each head, written
// and read several times. That memory, and its traffic, is what FlashAttention avoids.
// Without a mask about as fast as rung 6: it makes the same products. Causal half as fast: it makes hidden pairs too.
// Measured (AMD EPYC, 2 threads, Zen 5): d64 full 10.8; d64 causal 5.24; d128 full 9.93; d128 causal 4.98 GFLOP/s.
#include <algorithm>
#include <cmath>
#include <vector>

#include "../rung.h"

extern "C" void rung(const Attention* p) {
  const int d = p->d, n = p->queries, keys = p->keys;
  const float scale = 1 / std::sqrt(float(d));
  std::vector<float> s(std::size_t(n) * keys);
  for (int h = 0; h < p->heads; ++h) {
    const float *q = p->q + std::size_t(h) * n * d, *k = p->k + std::size_t(h) * keys * d;
    const float* v = p->v + std::size_t(h) * keys * d;
    float *out = p->out + std::size_t(h) * n * d, *lse = p->lse + std::size_t(h) * n;
    for (int i = 0; i < n; ++i)  // S
      for (int j = 0; j < keys; ++j) {
        float sum = 0;
        for (int c = 0; c < d; ++c) sum += q[i * d + c] * k[j * d + c];
        s[std::size_t(i) * keys + j] = p->causal && j > i ? -INFINITY : sum * scale;
      }
    for (int i = 0; i < n; ++i) {  // P
      float* row = s.data() + std::size_t(i) * keys;
      const float largest = keys ? *std::max_element(row, row + keys) : -INFINITY;
      float sum = 0;
      for (int j = 0; j < keys; ++j) sum += row[j] = std::exp(row[j] - largest);
      for (int j = 0; j < keys; ++j) row[j] /= sum;
      lse[i] = sum > 0 ? largest + std::log(sum) : -INFINITY;
    }
    std::fill(out, out + std::size_t(n) * d, 0.0f);
    for (int i = 0; i < n; ++i)  // O
      for (int j = 0; j < keys; ++j)
        for (int c = 0; c < d; ++c) out[i * d + c] += s[std::size_t(i) * keys + j] * v[j * d + c];
  }
}
