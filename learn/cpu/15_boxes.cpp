// Rung 15: blocks are boxes: a window in two dimensions.
//
// Changed: a pixel sees the pixels within `window` of it in both directions. 64 pixels in a row have such neighbours in
// 2 window - 1 rows, and most of each visited block is hidden. So a block is a box of 8 x 8 pixels, of queries and of
// keys. Only the copies know it: they gather a box's rows. Its words are outer products of two intervals of 8 bits.
// Expected: at window 8 a row of 64 pixels visits 15 or more blocks of 64, a box 9. Queries and keys: width * height.
// Measured (AMD EPYC, 2 threads, Zen 5): width 64, window 8 66.2 GFLOP/s.
#include <hwy/highway.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
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

using Word = std::uint64_t;  // a bit for each key of a block of 64
enum class Tile { skip, full, partial };

// A block is a box of 8 x 8 pixels: entry n of box (x, y) is pixel (8 x + n % 8, 8 y + n / 8).
struct Image {
  int width, height, window;
  int across() const { return (width + 7) / 8; }
  int boxes() const { return across() * ((height + 7) / 8); }
  // Where entry n of a box is in the sequence; -1 if it lies outside the image.
  int pixel(int box, int n) const {
    const int x = box % across() * 8 + n % 8, y = box / across() * 8 + n / 8;
    return x < width && y < height ? y * width + x : -1;
  }
  // The pixels at from <= x < from + 8 whose distance from `at` is less than the window, as 8 bits.
  Word near(int at, int from, int size) const {
    const int low = std::max(at - window + 1 - from, 0), high = std::min({at + window - from, size - from, 8});
    return low < high ? (0xffu >> (8 - (high - low))) << low : 0;
  }
  // Bit r of the rows goes to bit 8 r: then a product puts the columns' 8 bits there.
  Word word(int query_box, int n, int key_box) const {
    const Word columns = near(query_box % across() * 8 + n % 8, key_box % across() * 8, width);
    const Word rows = near(query_box / across() * 8 + n / 8, key_box / across() * 8, height);
    Word spread = 0;
    for (int r = 0; r < 8; ++r) spread |= (rows >> r & 1) << 8 * r;
    return columns * spread;
  }
  Tile tile(int query_box, int key_box) const {
    const int x = std::abs(query_box % across() - key_box % across()) * 8;
    const int y = std::abs(query_box / across() - key_box / across()) * 8;
    if (x - 7 >= window || y - 7 >= window) return Tile::skip;
    const bool inside = key_box % across() * 8 + 8 <= width && key_box / across() * 8 + 8 <= height;
    return inside && x + 7 < window && y + 7 < window ? Tile::full : Tile::partial;
  }
};

// A head's keys and values.
struct Panels {
  Panels(const float* from_k, const float* from_v, const Image& image, int d, int padded)
      : k(std::size_t(image.boxes()) * kKeys * d), v(std::size_t(image.boxes()) * kKeys * padded) {
    for (int j = 0; j < image.boxes() * kKeys; ++j) {
      const int at = image.pixel(j / kKeys, j % kKeys);
      if (at < 0) continue;
      float* block = k.data() + std::size_t(j / kKeys) * kKeys * d + j % kKeys;
      for (int c = 0; c < d; ++c) block[c * kKeys] = from_k[std::size_t(at) * d + c];
      std::copy_n(from_v + std::size_t(at) * d, d, v.data() + std::size_t(j) * padded);
    }
  }
  std::vector<float> k, v;
};

struct Blocks {
  explicit Blocks(int d) : d(d), padded((d + kColumns - 1) / kColumns * kColumns) {}
  int d, padded;  // channels, and those of V and O
  std::vector<float> q = std::vector<float>(kQueries * d), o = std::vector<float>(kQueries * padded);
  std::vector<float> sums = std::vector<float>(kQueries * kLanes);
  float s[kQueries * kKeys], m[kQueries], factor[kQueries];

  void load_queries(const float* from, const Image& image, int box, float scale) {
    for (int i = 0; i < kQueries; ++i) {
      const int at = image.pixel(box, i);
      for (int c = 0; c < d; ++c)
        q[(i / kRows * d + c) * kRows + i % kRows] = at >= 0 ? from[std::size_t(at) * d + c] * scale : 0;
    }
    std::fill_n(m, kQueries, -FLT_MAX);
    std::fill(sums.begin(), sums.end(), 0.0f);
    std::fill(o.begin(), o.end(), 0.0f);
  }

  // Scores become weights. word(i): which keys of the block query i sees; asked if the tile is partial.
  template <class Words>
  void softmax(bool partial, const Words& word) {
    for (int i = 0; i < kQueries; ++i) {
      float* row = s + i * kKeys;
      if (partial) {
        const Word seen = word(i);
        for (int j = 0; j < kKeys; j += kLanes) {
          const Word part = seen >> j;
          const auto mask = hn::LoadMaskBits(tag, reinterpret_cast<const uint8_t*>(&part));
          hn::StoreU(hn::IfThenElse(mask, hn::LoadU(tag, row + j), hn::Set(tag, -INFINITY)), tag, row + j);
        }
      }
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

  void store(float* out, float* lse, const Image& image, int box) const {
    for (int i = 0; i < kQueries; ++i) {
      const int at = image.pixel(box, i);
      if (at < 0) continue;
      const float l = hn::ReduceSum(tag, hn::LoadU(tag, &sums[i * kLanes]));  // each pixel sees itself: l > 0
      for (int c = 0; c < d; ++c) out[std::size_t(at) * d + c] = o[i * padded + c] / l;
      lse[at] = m[i] + std::log(l);
    }
  }
};

}  // namespace

extern "C" void rung(const Attention* p) {
  const int d = p->d;
  const Image image{p->width, p->queries / p->width, p->window};
  Blocks block(d);
  const auto q = [&](int i, int l) { return &block.q[(i / kRows * d + l) * kRows + i % kRows]; };
  const auto s = [&](int i, int l) { return &block.s[i * kKeys + l]; };
  for (int h = 0; h < p->heads; ++h) {
    const std::size_t first = std::size_t(h) * p->queries;
    const Panels panels(p->k + first * d, p->v + first * d, image, d, block.padded);
    for (int i = 0; i < image.boxes(); ++i) {
      block.load_queries(p->q + first * d, image, i, 1 / std::sqrt(float(d)));
      for (int j = 0; j < image.boxes(); ++j) {
        const Tile tile = image.tile(i, j);
        if (tile == Tile::skip) continue;
        multiply(kQueries, kKeys, d, q, panels.k.data() + std::size_t(j) * kKeys * d, block.s, nullptr);
        block.softmax(tile == Tile::partial, [&](int n) { return image.word(i, n, j); });
        const float* v = panels.v.data() + std::size_t(j) * kKeys * block.padded;
        multiply(kQueries, block.padded, kKeys, s, v, block.o.data(), block.factor);
      }
      block.store(p->out + first * d, p->lse + first, image, i);
    }
  }
}
