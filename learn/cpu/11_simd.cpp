// Rung 11: vectors written by hand, with Highway: the products, and an exponential for a whole vector.
//
// Changed: std::exp took one number at a time. exp(x) = 2^n exp(r), with n the nearest integer to x / ln 2 and
// |r| <= ln(2) / 2, where a polynomial of degree 6 is exact to float32's last bit; 2^n is n added to the exponent's
// bits. That is 13 instructions for 16 numbers. The maximum of a row is compared in vectors and found as one number
// only if it has risen; l is summed in vectors, one for each row, and added up at the end.
// Expected: exponentials fall from most of the time to an eighth; then copying K transposed is the largest rest.
// Highway compiles the same source for SSE, AVX2, AVX-512, NEON and others. Not for SVE: arrays of vectors want a known
// size.
// Measured (AMD EPYC, 2 threads, Zen 5): d64 full 169; d64 causal 157; d128 full 176; d128 causal 161 GFLOP/s.
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
void multiply(int rows, int columns, int depth, const float* a, int a_row, const float* b, float* c,
              const float* factor) {
  for (int i = 0; i < rows; i += kRows)
    for (int j = 0; j < columns; j += kColumns) {
      Vector left[kRows], right[kRows];
      for (int r = 0; r < kRows; ++r) left[r] = right[r] = hn::Zero(tag);
      for (int l = 0; l < depth; ++l) {
        const Vector b0 = hn::LoadU(tag, b + l * columns + j), b1 = hn::LoadU(tag, b + l * columns + j + kLanes);
        for (int r = 0; r < kRows; ++r) {
          const Vector x = hn::Set(tag, a[(i + r) * a_row + l]);
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

struct Blocks {
  explicit Blocks(int d) : d(d), padded((d + kColumns - 1) / kColumns * kColumns) {}

  int d, padded;  // channels, and those of V and O
  std::vector<float> q = std::vector<float>(kQueries * d), k = std::vector<float>(d * kKeys);
  std::vector<float> v = std::vector<float>(kKeys * padded), o = std::vector<float>(kQueries * padded);
  std::vector<float> sums = std::vector<float>(kQueries * kLanes);  // of weights, a vector for each query
  float s[kQueries * kKeys], m[kQueries], factor[kQueries];

  void load_queries(const float* from, int count, float scale) {
    for (int i = 0; i < kQueries * d; ++i) q[i] = i < count * d ? from[i] * scale : 0;
    std::fill_n(m, kQueries, -FLT_MAX);
    std::fill(sums.begin(), sums.end(), 0.0f);
    std::fill(o.begin(), o.end(), 0.0f);
  }

  void load_keys(const float* from_k, const float* from_v, int count) {
    for (int j = 0; j < kKeys; ++j)
      for (int c = 0; c < d; ++c) {
        k[c * kKeys + j] = j < count ? from_k[j * d + c] : 0;
        v[j * padded + c] = j < count ? from_v[j * d + c] : 0;
      }
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
      block.store(p->out + first * d, p->lse + first, queries);
    }
}
