// Rung 9: FlashAttention-2's loops (Dao, 2023): queries outside, keys inside, one division at the end.
//
// Changed: the loops are exchanged. O, l and m of one query stay close while all keys pass by: nothing is read back
// from memory, and O is divided by l once. Queries do not depend on each other, so threads can share them (rung 13).
// Expected: the division and the reading of O are gone, but they were a small part; most of the time is products
// that the compiler does one by one (a sum over the depth, in the order written). The next rungs change that.
// With d128, causal, it is not faster (0.97 times). Why is not known. With 256 tokens, which fit into L2, it is not
// faster either.
// Measured (AMD EPYC, 2 threads, Zen 5): d64 full 12.5; d64 causal 12.2; d128 full 10.6; d128 causal 10.6 GFLOP/s.
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
  std::vector<float> o(d);
  for (int h = 0; h < p->heads; ++h) {
    const float *q = p->q + std::size_t(h) * n * d, *k = p->k + std::size_t(h) * p->keys * d;
    const float* v = p->v + std::size_t(h) * p->keys * d;
    for (int i = 0; i < n; ++i) {
      const int seen = p->causal ? std::min(i + 1, p->keys) : p->keys;
      float m = -FLT_MAX, l = 0;
      std::fill(o.begin(), o.end(), 0.0f);
      for (int j0 = 0; j0 < seen; j0 += kKeys) {
        const int count = std::min(kKeys, seen - j0);
        float s[kKeys], largest = m;
        for (int j = 0; j < count; ++j) {
          s[j] = 0;
          for (int c = 0; c < d; ++c) s[j] += q[i * d + c] * k[(j0 + j) * d + c];
          largest = std::max(largest, s[j] *= scale);
        }
        const float f = std::exp(m - largest);
        l *= f;
        for (int c = 0; c < d; ++c) o[c] *= f;
        for (int j = 0; j < count; ++j) {
          l += s[j] = std::exp(s[j] - largest);
          for (int c = 0; c < d; ++c) o[c] += s[j] * v[(j0 + j) * d + c];
        }
        m = largest;
      }
      const std::size_t row = std::size_t(h) * n + i;
      for (int c = 0; c < d; ++c) p->out[row * d + c] = l > 0 ? o[c] / l : 0;
      p->lse[row] = l > 0 ? m + std::log(l) : -INFINITY;
    }
  }
}
