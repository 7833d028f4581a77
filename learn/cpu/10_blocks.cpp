// Rung 10: blocks of 64 queries and 64 keys, and both products by rung 3's register tiles.
//
// Changed: the scores of 64 queries and 64 keys are one matrix product, and so is P V: each number that is loaded is
// used 8 or 32 times from a register. K's block is copied transposed, so that a vector holds a channel of 32 keys; V's
// block is padded to whole vectors. A block's size is a compromise: Q, K, V, S and O of it together stay in a cache,
// 100 KiB at 64 channels, and it is large enough that copies and rescaling do not count.
// Expected: most of rung 3's gain. What is left is std::exp, one number at a time.
// Measured (AMD EPYC, 2 threads, Zen 5): d64 full 38.1; d64 causal 36.9; d128 full 62.8; d128 causal 60.5 GFLOP/s.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "../rung.h"

namespace {

constexpr int kQueries = 64, kKeys = 64, kRows = 8, kColumns = 32;

// c = c * factor + a b, kRows x kColumns numbers of it in registers. factor: of each row; null if c is written anew.
// columns: of b and c, a multiple of kColumns. rows: of a and c, a multiple of kRows.
void multiply(int rows, int columns, int depth, const float* a, int a_row, const float* b, float* c,
              const float* factor) {
  for (int i = 0; i < rows; i += kRows)
    for (int j = 0; j < columns; j += kColumns) {
      float sum[kRows][kColumns] = {};
      for (int l = 0; l < depth; ++l)
        for (int r = 0; r < kRows; ++r)
          for (int n = 0; n < kColumns; ++n) sum[r][n] += a[(i + r) * a_row + l] * b[l * columns + j + n];
      for (int r = 0; r < kRows; ++r) {
        float* to = c + (i + r) * columns + j;
        for (int n = 0; n < kColumns; ++n) to[n] = factor ? to[n] * factor[i + r] + sum[r][n] : sum[r][n];
      }
    }
}

struct Blocks {
  explicit Blocks(int d) : d(d), padded((d + kColumns - 1) / kColumns * kColumns) {}

  int d, padded;  // channels, and those of V and O
  std::vector<float> q = std::vector<float>(kQueries * d), k = std::vector<float>(d * kKeys);
  std::vector<float> v = std::vector<float>(kKeys * padded), o = std::vector<float>(kQueries * padded);
  float s[kQueries * kKeys], m[kQueries], l[kQueries], factor[kQueries];

  void load_queries(const float* from, int count, float scale) {
    for (int i = 0; i < kQueries * d; ++i) q[i] = i < count * d ? from[i] * scale : 0;
    std::fill_n(m, kQueries, -FLT_MAX);
    std::fill_n(l, kQueries, 0.0f);
    std::fill(o.begin(), o.end(), 0.0f);
  }

  void load_keys(const float* from_k, const float* from_v, int count) {
    for (int j = 0; j < kKeys; ++j)
      for (int c = 0; c < d; ++c) {
        k[c * kKeys + j] = j < count ? from_k[j * d + c] : 0;
        v[j * padded + c] = j < count ? from_v[j * d + c] : 0;
      }
  }

  // Scores become weights. seen: the keys of the block that each query sees, from the first on.
  template <class Seen>
  void softmax(const Seen& seen) {
    for (int i = 0; i < kQueries; ++i) {
      float* row = s + i * kKeys;
      const int count = seen(i);
      const float largest = count > 0 ? std::max(m[i], *std::max_element(row, row + count)) : m[i];
      factor[i] = std::exp(m[i] - largest);
      float sum = 0;
      for (int j = 0; j < kKeys; ++j) sum += row[j] = j < count ? std::exp(row[j] - largest) : 0;
      l[i] = l[i] * factor[i] + sum;
      m[i] = largest;
    }
  }
};

}  // namespace

extern "C" void rung(const Attention* p) {
  const int d = p->d;
  Blocks block(d);
  for (int h = 0; h < p->heads; ++h)
    for (int i0 = 0; i0 < p->queries; i0 += kQueries) {
      const std::size_t first = std::size_t(h) * p->queries + i0;
      const int queries = std::min(kQueries, p->queries - i0);
      block.load_queries(p->q + first * d, queries, 1 / std::sqrt(float(d)));
      const int end = p->causal ? std::min(i0 + kQueries, p->keys) : p->keys;
      for (int j0 = 0; j0 < end; j0 += kKeys) {
        const std::size_t key = std::size_t(h) * p->keys + j0;
        const int keys = std::min(kKeys, p->keys - j0);
        block.load_keys(p->k + key * d, p->v + key * d, keys);
        multiply(kQueries, kKeys, d, block.q.data(), d, block.k.data(), block.s, nullptr);
        block.softmax([&](int i) { return p->causal ? std::clamp(i0 + i + 1 - j0, 0, keys) : keys; });
        multiply(kQueries, block.padded, kKeys, block.s, kKeys, block.v.data(), block.o.data(), block.factor);
      }
      for (int i = 0; i < queries; ++i) {
        const float l = block.l[i];
        for (int c = 0; c < d; ++c) p->out[(first + i) * d + c] = l > 0 ? block.o[i * block.padded + c] / l : 0;
        p->lse[first + i] = l > 0 ? block.m[i] + std::log(l) : -INFINITY;
      }
    }
}
