// Rung 12: keys and values are packed once for each head, not once for each block of queries.
//
// Changed: at 1024 queries rung 11 copied and transposed every key 16 times. Here a head's keys lie ready in panels, a
// block of 64 keys after the other, each (d, 64); values as (keys, whole vectors). Memory: as much as K and V of one
// head. The queries' rows are packed too, 8 of them side by side, so that a step of the depth reads one line, not
// eight.
// Expected: the copies fall to a hundredth. What remains: two products at the speed of rung 3, and the softmax.
// Measured (AMD EPYC, 2 threads, Zen 5): d64 full 202; d64 causal 184; d128 full 212; d128 causal 192 GFLOP/s.
#include <hwy/highway.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "../rung.h"

namespace {

namespace hn = hwy::HWY_NAMESPACE;
const hn::ScalableTag<float> tag;
const hn::RebindToSigned<decltype(tag)> bits;
using Vector = hn::Vec<decltype(tag)>;

constexpr int kQueries = 64, kKeys = 64, kRows = 8;
const int kLanes = int(hn::Lanes(tag)), kColumns = 2 * kLanes;

// exp of numbers that are at most 0.
Vector exp_of(Vector x) {
  x = hn::Max(x, hn::Set(tag, -87.0f));
  const Vector n = hn::Round(hn::Mul(x, hn::Set(tag, 1.44269504f)));
  Vector r = hn::NegMulAdd(n, hn::Set(tag, 0.693359375f), x);  // ln 2 in two parts: the first has few bits
  r = hn::NegMulAdd(n, hn::Set(tag, -2.12194440e-4f), r);
  Vector y = hn::Set(tag, 1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = hn::MulAdd(y, r, hn::Set(tag, c));
  return hn::BitCast(tag, hn::Add(hn::BitCast(bits, y), hn::ShiftLeft<23>(hn::ConvertTo(bits, n))));
}

// c = c * factor + a b, kRows x kColumns numbers of it in registers. factor: of each row; null if c is written anew.
// a(i, l): where number l of row i is.
template <class A>
void multiply(int rows, int columns, int depth, const A& a, const float* b, float* c, const float* factor) {
  for (int i = 0; i < rows; i += kRows)
    for (int j = 0; j < columns; j += kColumns) {
      Vector left[kRows], right[kRows];
      for (int r = 0; r < kRows; ++r) left[r] = right[r] = hn::Zero(tag);
      for (int l = 0; l < depth; ++l) {
        const Vector b0 = hn::LoadU(tag, b + l * columns + j), b1 = hn::LoadU(tag, b + l * columns + j + kLanes);
        for (int r = 0; r < kRows; ++r) {
          const Vector x = hn::Set(tag, *a(i + r, l));
          left[r] = hn::MulAdd(x, b0, left[r]), right[r] = hn::MulAdd(x, b1, right[r]);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        float* to = c + (i + r) * columns + j;
        if (factor) {
          const Vector f = hn::Set(tag, factor[i + r]);
          left[r] = hn::MulAdd(hn::LoadU(tag, to), f, left[r]);
          right[r] = hn::MulAdd(hn::LoadU(tag, to + kLanes), f, right[r]);
        }
        hn::StoreU(left[r], tag, to), hn::StoreU(right[r], tag, to + kLanes);
      }
    }
}

// A head's keys and values.
struct Panels {
  Panels(const float* from_k, const float* from_v, int keys, int d, int padded)
      : k(std::size_t(keys + kKeys - 1) / kKeys * kKeys * d),
        v(std::size_t(keys + kKeys - 1) / kKeys * kKeys * padded) {
    for (int j = 0; j < keys; ++j) {
      float* block = k.data() + std::size_t(j / kKeys) * kKeys * d + j % kKeys;
      for (int c = 0; c < d; ++c) block[c * kKeys] = from_k[std::size_t(j) * d + c];
      std::copy_n(from_v + std::size_t(j) * d, d, v.data() + std::size_t(j) * padded);
    }
  }
  std::vector<float> k, v;
};

struct Blocks {
  explicit Blocks(int d) : d(d), padded((d + kColumns - 1) / kColumns * kColumns) {}

  int d, padded;  // channels, and those of V and O
  std::vector<float> q = std::vector<float>(kQueries * d), o = std::vector<float>(kQueries * padded);
  std::vector<float> sums = std::vector<float>(kQueries * kLanes);  // of weights, a vector for each query
  float s[kQueries * kKeys], m[kQueries], factor[kQueries];

  void load_queries(const float* from, int count, float scale) {
    for (int i = 0; i < kQueries; ++i)  // panels of kRows rows, (d, kRows)
      for (int c = 0; c < d; ++c) q[(i / kRows * d + c) * kRows + i % kRows] = i < count ? from[i * d + c] * scale : 0;
    std::fill_n(m, kQueries, -FLT_MAX);
    std::fill(sums.begin(), sums.end(), 0.0f);
    std::fill(o.begin(), o.end(), 0.0f);
  }

  // Scores become weights. seen(i): how many keys of the block query i sees, from the first on.
  template <class Seen>
  void softmax(const Seen& seen) {
    for (int i = 0; i < kQueries; ++i) {
      float* row = s + i * kKeys;
      std::fill(row + seen(i), row + kKeys, -INFINITY);
      Vector largest = hn::Set(tag, m[i]);
      for (int j = 0; j < kKeys; j += kLanes) largest = hn::Max(largest, hn::LoadU(tag, row + j));
      factor[i] = 1;
      if (!hn::AllFalse(tag, hn::Gt(largest, hn::Set(tag, m[i])))) {
        const float now = hn::ReduceMax(tag, largest);
        factor[i] = std::exp(m[i] - now), m[i] = now;
      }
      const Vector shift = hn::Set(tag, m[i]);
      Vector sum = hn::Mul(hn::LoadU(tag, &sums[i * kLanes]), hn::Set(tag, factor[i]));
      for (int j = 0; j < kKeys; j += kLanes) {
        const Vector x = hn::LoadU(tag, row + j);
        const Vector p = hn::IfThenElseZero(hn::Gt(x, hn::Set(tag, -FLT_MAX)), exp_of(hn::Sub(x, shift)));
        sum = hn::Add(sum, p), hn::StoreU(p, tag, row + j);
      }
      hn::StoreU(sum, tag, &sums[i * kLanes]);
    }
  }

  void store(float* out, float* lse, int count) const {
    for (int i = 0; i < count; ++i) {
      const float l = hn::ReduceSum(tag, hn::LoadU(tag, &sums[i * kLanes]));
      for (int c = 0; c < d; ++c) out[i * d + c] = l > 0 ? o[i * padded + c] / l : 0;
      lse[i] = l > 0 ? m[i] + std::log(l) : -INFINITY;
    }
  }
};

}  // namespace

extern "C" void rung(const Attention* p) {
  const int d = p->d;
  Blocks block(d);
  const auto q = [&](int i, int l) { return &block.q[(i / kRows * d + l) * kRows + i % kRows]; };
  const auto s = [&](int i, int l) { return &block.s[i * kKeys + l]; };
  for (int h = 0; h < p->heads; ++h) {
    const std::size_t key = std::size_t(h) * p->keys * d;
    const Panels panels(p->k + key, p->v + key, p->keys, d, block.padded);
    for (int i0 = 0; i0 < p->queries; i0 += kQueries) {
      const std::size_t first = std::size_t(h) * p->queries + i0;
      const int queries = std::min(kQueries, p->queries - i0);
      block.load_queries(p->q + first * d, queries, 1 / std::sqrt(float(d)));
      const int end = p->causal ? std::min(i0 + kQueries, p->keys) : p->keys;
      for (int j0 = 0; j0 < end; j0 += kKeys) {
        const int keys = std::min(kKeys, p->keys - j0);
        multiply(kQueries, kKeys, d, q, panels.k.data() + std::size_t(j0) * d, block.s, nullptr);
        block.softmax([&](int i) { return p->causal ? std::clamp(i0 + i + 1 - j0, 0, keys) : keys; });
        const float* v = panels.v.data() + std::size_t(j0) * block.padded;
        multiply(kQueries, block.padded, kKeys, s, v, block.o.data(), block.factor);
      }
      block.store(p->out + first * d, p->lse + first, queries);
    }
  }
}
