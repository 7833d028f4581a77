// Rung 8: FlashAttention-1's loops (Dao et al., 2022, algorithm 1): key blocks outside, queries inside.
//
// Changed: no matrix of scores. A block of keys and values is loaded once and meets every query; O, l and m of all
// queries wait in memory and are rescaled each time. O is kept divided, so it is multiplied by l, rescaled, and divided
// by the new l at every visit.
// Expected: memory linear in the sequence. Not faster than rung 7 where the matrix fits into a cache: each visit of a
// query reads and writes its whole row of O. Causal it is twice as fast, since rung 7 also makes hidden pairs.
// Measured (AMD EPYC, 2 threads, Zen 5): d64 full 11.1; d64 causal 10.6; d128 full 10.3; d128 causal 10.9 GFLOP/s.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "../rung.h"

namespace {
constexpr int kKeys = 64;  // of a block
}

extern "C" void rung(const Attention* p) {
  const int d = p->d, n = p->queries;
  const float scale = 1 / std::sqrt(float(d));
  std::vector<float> m(n), l(n);
  for (int h = 0; h < p->heads; ++h) {
    const float *q = p->q + std::size_t(h) * n * d, *k = p->k + std::size_t(h) * p->keys * d;
    const float* v = p->v + std::size_t(h) * p->keys * d;
    float *out = p->out + std::size_t(h) * n * d, *lse = p->lse + std::size_t(h) * n;
    std::fill(m.begin(), m.end(), -FLT_MAX);
    std::fill(l.begin(), l.end(), 0.0f);
    std::fill(out, out + std::size_t(n) * d, 0.0f);
    for (int j0 = 0; j0 < p->keys; j0 += kKeys) {
      for (int i = p->causal ? j0 : 0; i < n; ++i) {  // queries before j0 see nothing of this block
        const int count = std::min({kKeys, p->keys - j0, p->causal ? i + 1 - j0 : kKeys});
        float s[kKeys], largest = m[i], sum = 0;
        for (int j = 0; j < count; ++j) {
          s[j] = 0;
          for (int c = 0; c < d; ++c) s[j] += q[i * d + c] * k[(j0 + j) * d + c];
          largest = std::max(largest, s[j] *= scale);
        }
        for (int j = 0; j < count; ++j) sum += s[j] = std::exp(s[j] - largest);
        const float before = l[i] * std::exp(m[i] - largest), after = before + sum;
        float* o = out + i * d;
        for (int c = 0; c < d; ++c) o[c] *= before / after;
        for (int j = 0; j < count; ++j)
          for (int c = 0; c < d; ++c) o[c] += s[j] / after * v[(j0 + j) * d + c];
        m[i] = largest, l[i] = after;
      }
    }
    for (int i = 0; i < n; ++i) lse[i] = l[i] > 0 ? m[i] + std::log(l[i]) : -INFINITY;
  }
}
