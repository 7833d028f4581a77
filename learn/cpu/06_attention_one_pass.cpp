// Rung 6: attention of one row in one pass over the keys.
//
// Changed: rung 5 needed a second pass to write the quotients. Attention does not want them, it wants their weighted
// sum of V's rows, and that sum can be rescaled like l: with every new score s,
//   m' = max(m, s),  f = exp(m - m'),  p = exp(s - m'),  l' = l f + p,  o' = o f + p v,
// and o / l in the end. The row of scores is nowhere: this loop is FlashAttention, with blocks of one query and one
// key. m starts at the lowest number, not at -infinity: a row that sees no key would give exp(-infinity + infinity), a
// NaN.
// Measured (AMD EPYC, 2 threads, Zen 5): d64 full 10.6; d64 causal 10.6; d128 full 9.51; d128 causal 9.62 GFLOP/s.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "../rung.h"

extern "C" void rung(const Attention* p) {
  const int d = p->d;
  const float scale = 1 / std::sqrt(float(d));
  std::vector<float> o(d);
  for (int h = 0; h < p->heads; ++h)
    for (int i = 0; i < p->queries; ++i) {
      const std::size_t row = std::size_t(h) * p->queries + i;
      const float* q = p->q + row * d;
      const int seen = p->causal ? std::min(i + 1, p->keys) : p->keys;
      float m = -FLT_MAX, l = 0;
      std::fill(o.begin(), o.end(), 0.0f);
      for (int j = 0; j < seen; ++j) {
        const float* k = p->k + (std::size_t(h) * p->keys + j) * d;
        const float* v = p->v + (std::size_t(h) * p->keys + j) * d;
        float s = 0;
        for (int c = 0; c < d; ++c) s += q[c] * k[c];
        s *= scale;
        const float now = std::max(m, s), f = std::exp(m - now), weight = std::exp(s - now);
        l = l * f + weight;
        for (int c = 0; c < d; ++c) o[c] = o[c] * f + weight * v[c];
        m = now;
      }
      for (int c = 0; c < d; ++c) p->out[row * d + c] = l > 0 ? o[c] / l : 0;
      p->lse[row] = l > 0 ? m + std::log(l) : -INFINITY;
    }
}
