// Rung 18: the backward pass on threads.
//
// Changed: heads go to threads. If the number of heads is not a multiple of the number of threads, a head is cut into
// parts. A part has every n-th pair of a key block from the front and one from the back, and at least one pair. In a
// causal call all pairs are the same work. dK and dV are a part's alone, but every key block adds to dQ of all queries:
// each part has a dQ of its own, and they are added up in order. So the result is the same in every run on so many
// threads; the GPU's usual way, atomic additions, is not.
// A thread prepares the queries of its part itself: each part of a head does it again.
// Expected: as many times faster as there are cores. Memory: a dQ for each part of each head, and for each thread the
// padded Q and dO of a head.
// Tried, in percentage points of the library's speed, d128 causal. Only the visible half of a tile on the diagonal: 3
// to 5 more, left out to stay short. Blocks of 32: 3 to 4 more, left out because they lose up to 1 without a mask.
// Measured (AMD EPYC, 2 threads, Zen 5): d64 full 435; d64 causal 399; d128 full 448; d128 causal 406 GFLOP/s.
#include <hwy/highway.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "../rung.h"

namespace {

namespace hn = hwy::HWY_NAMESPACE;
const hn::ScalableTag<float> tag;
const hn::RebindToSigned<decltype(tag)> bits;
using Vector = hn::Vec<decltype(tag)>;

constexpr int kBlock = 64, kRows = 8;  // kBlock: queries and keys
const int kLanes = int(hn::Lanes(tag)), kColumns = 2 * kLanes;

// exp of numbers that are at most a little above 0.
Vector exp_of(Vector x) {
  x = hn::Max(x, hn::Set(tag, -87.0f));
  const Vector n = hn::Round(hn::Mul(x, hn::Set(tag, 1.44269504f)));
  Vector r = hn::NegMulAdd(n, hn::Set(tag, 0.693359375f), x);  // ln 2 in two parts: the first has few bits
  r = hn::NegMulAdd(n, hn::Set(tag, -2.12194440e-4f), r);
  Vector y = hn::Set(tag, 1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) y = hn::MulAdd(y, r, hn::Set(tag, c));
  return hn::BitCast(tag, hn::Add(hn::BitCast(bits, y), hn::ShiftLeft<23>(hn::ConvertTo(bits, n))));
}

// c += a b, or c = a b, kRows x kColumns numbers of it in registers. a(i, l): where number l of row i is.
template <bool add, class A>
void multiply(int rows, int columns, int depth, const A& a, const float* b, float* c) {
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
        if (add)
          left[r] = hn::Add(hn::LoadU(tag, to), left[r]), right[r] = hn::Add(hn::LoadU(tag, to + kLanes), right[r]);
        hn::StoreU(left[r], tag, to), hn::StoreU(right[r], tag, to + kLanes);
      }
    }
}

// Whole blocks of rows and whole vectors of channels, with zeros behind what there is.
struct Padded {
  Padded(const float* from, int count, int d, int width, float factor = 1)
      : width(width), rows(std::size_t(count + kBlock - 1) / kBlock * kBlock * width) {
    for (int i = 0; i < count; ++i)
      for (int c = 0; c < d; ++c) rows[std::size_t(i) * width + c] = from[std::size_t(i) * d + c] * factor;
  }
  const float* block(int first) const { return rows.data() + std::size_t(first) * width; }

  int width;
  std::vector<float> rows;
};

// What one head's queries bring, and their gradient.
struct Queries {
  Queries(const Attention& p, int h, int width)
      : q(p.q + std::size_t(h) * p.queries * p.d, p.queries, p.d, width, 1 / std::sqrt(float(p.d))),
        dout(p.dout + std::size_t(h) * p.queries * p.d, p.queries, p.d, width),
        lse(q.rows.size() / width, INFINITY),
        delta(lse.size()) {
    for (int i = 0; i < p.queries; ++i) {
      const std::size_t row = std::size_t(h) * p.queries + i;
      if (p.lse[row] > -INFINITY) lse[i] = p.lse[row];  // exp(S - infinity) = 0: queries that see no key, and padding
      for (int c = 0; c < p.d; ++c) delta[i] += p.dout[row * p.d + c] * p.out[row * p.d + c];
    }
  }
  Padded q, dout;
  std::vector<float> lse, delta;
};

// A key block's share of all three gradients.
struct KeyBlock {
  KeyBlock(int d, int width) : d(d), width(width), kt(d * kBlock), vt(kt), k(kBlock * width), dk(k), dv(k) {}

  int d, width;
  std::vector<float> kt, vt, k, dk, dv;  // K and V transposed, (d, keys); K; gradients: (keys, width)
  float p[kBlock * kBlock], ds[kBlock * kBlock];

  // dq: (all queries, width), to which this block's share is added.
  void run(const Attention& a, const Queries& queries, int h, int j0, float* dq) {
    const int keys = std::min(kBlock, a.keys - j0);
    const std::size_t first = (std::size_t(h) * a.keys + j0) * d;
    for (int j = 0; j < kBlock; ++j)
      for (int c = 0; c < d; ++c) {
        kt[c * kBlock + j] = k[j * width + c] = j < keys ? a.k[first + j * d + c] : 0;
        vt[c * kBlock + j] = j < keys ? a.v[first + j * d + c] : 0;
      }
    std::fill(dk.begin(), dk.end(), 0.0f), std::fill(dv.begin(), dv.end(), 0.0f);
    const auto column = [](const float* from) { return [=](int i, int l) { return from + l * kBlock + i; }; };
    for (int i0 = a.causal ? j0 : 0; i0 < a.queries; i0 += kBlock) {
      const float *q = queries.q.block(i0), *dout = queries.dout.block(i0);
      const auto row = [this](const float* from) { return [=, this](int i, int l) { return from + i * width + l; }; };
      multiply<false>(kBlock, kBlock, d, row(q), kt.data(), p);
      multiply<false>(kBlock, kBlock, d, row(dout), vt.data(), ds);
      finish(a, &queries.lse[i0], &queries.delta[i0], i0, j0, keys);
      multiply<true>(kBlock, width, kBlock, column(p), dout, dv.data());
      multiply<true>(kBlock, width, kBlock, column(ds), q, dk.data());
      const auto of_ds = [this](int i, int l) { return ds + i * kBlock + l; };
      multiply<true>(kBlock, width, kBlock, of_ds, k.data(), dq + std::size_t(i0) * width);
    }
    for (int j = 0; j < keys; ++j) {
      std::copy_n(&dk[j * width], d, a.dk + first + j * d);
      std::copy_n(&dv[j * width], d, a.dv + first + j * d);
    }
  }

  // S becomes P, dP becomes dS.
  void finish(const Attention& a, const float* lse, const float* delta, int i0, int j0, int keys) {
    for (int i = 0; i < kBlock; ++i) {
      const int seen = a.causal ? std::clamp(i0 + i + 1 - j0, 0, keys) : keys;
      for (int j = 0; j < kBlock; j += kLanes) {
        const auto sees = hn::FirstN(tag, std::max(seen - j, 0));
        float *weight = p + i * kBlock + j, *derivative = ds + i * kBlock + j;
        const Vector x = hn::Sub(hn::LoadU(tag, weight), hn::Set(tag, lse[i]));
        const Vector y = hn::IfThenElseZero(hn::And(sees, hn::Gt(x, hn::Set(tag, -1e30f))), exp_of(x));
        hn::StoreU(y, tag, weight);
        const Vector dp = hn::Sub(hn::LoadU(tag, derivative), hn::Set(tag, delta[i]));
        hn::StoreU(hn::Mul(y, dp), tag, derivative);
      }
    }
  }
};

}  // namespace

extern "C" void rung(const Attention* p) {
  const int d = p->d, width = (d + kColumns - 1) / kColumns * kColumns;
  const int blocks = (p->keys + kBlock - 1) / kBlock;
  const int threads = omp_get_max_threads();
  const int parts = std::min(threads / std::gcd(threads, p->heads), std::max(1, (blocks + 1) / 2));
  const float scale = 1 / std::sqrt(float(d));
  std::vector<std::vector<float>> dq(std::size_t(p->heads) * parts);
#pragma omp parallel for schedule(dynamic)
  for (int task = 0; task < p->heads * parts; ++task) {
    const int h = task / parts;
    const Queries queries(*p, h, width);
    KeyBlock block(d, width);
    dq[task].resize(queries.q.rows.size());
    for (int n = task % parts; n < (blocks + 1) / 2; n += parts) {
      block.run(*p, queries, h, n * kBlock, dq[task].data());
      if (blocks - 1 - n > n) block.run(*p, queries, h, (blocks - 1 - n) * kBlock, dq[task].data());
    }
  }
#pragma omp parallel for collapse(2)
  for (int h = 0; h < p->heads; ++h)
    for (int i = 0; i < p->queries; ++i) {
      float* sum = p->dq + (std::size_t(h) * p->queries + i) * d;
      std::fill_n(sum, d, 0.0f);
      for (int part = 0; part < parts; ++part)
        for (int c = 0; c < d; ++c) sum[c] += dq[h * parts + part][std::size_t(i) * width + c] * scale;
    }
}
