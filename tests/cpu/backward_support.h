// What the backward tests share: a case (shapes, options, numbers), its gradients from plain loops in float64, and the
// library's gradients of the same numbers in any type and layout.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <anyflash/anyflash.h>

namespace backward_test {

using anyflash::ElementType;
using anyflash::Layout;
using anyflash::TensorView;

constexpr double infinity = std::numeric_limits<double>::infinity();

// Conversions written out, so that the tests share no code with the library.
inline std::uint16_t to_bfloat16(double x) {
  const float f = static_cast<float>(x);
  std::uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (std::isnan(f)) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline double from_bfloat16(std::uint16_t h) {
  const std::uint32_t bits = std::uint32_t(h) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline double from_float16(std::uint16_t h) {
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  const double sign = h & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return fraction ? std::nan("") : sign * infinity;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

inline std::uint16_t to_float16(double x) {
  if (std::isnan(x)) return 0x7e00;
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double a = std::fabs(x);
  if (a >= 65520) return sign | 0x7c00;
  int exponent = 0;
  std::frexp(a, &exponent);
  const int shift = std::max(exponent - 11, -24);  // the weight of the last bit
  const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(a, -shift)));
  return sign | static_cast<std::uint16_t>(shift == -24 ? units : ((shift + 25) << 10) + units - 1024);
}

inline std::size_t bytes_of(ElementType type) {
  return type == ElementType::float64 ? 8 : type == ElementType::float32 ? 4 : 2;
}

inline void store(void* data, ElementType type, std::int64_t i, double x) {
  switch (type) {
    case ElementType::float64: static_cast<double*>(data)[i] = x; break;
    case ElementType::float32: static_cast<float*>(data)[i] = static_cast<float>(x); break;
    case ElementType::bfloat16: static_cast<std::uint16_t*>(data)[i] = to_bfloat16(x); break;
    default: static_cast<std::uint16_t*>(data)[i] = to_float16(x);
  }
}

inline double load(const void* data, ElementType type, std::int64_t i) {
  switch (type) {
    case ElementType::float64: return static_cast<const double*>(data)[i];
    case ElementType::float32: return static_cast<const float*>(data)[i];
    case ElementType::bfloat16: return from_bfloat16(static_cast<const std::uint16_t*>(data)[i]);
    default: return from_float16(static_cast<const std::uint16_t*>(data)[i]);
  }
}

inline double rounded(double x, ElementType type) {
  double memory;
  store(&memory, type, 0, x);
  return load(&memory, type, 0);
}

using Numbers = std::vector<double>;  // (batch, heads, entries, channels), row-major

/// A call and its numbers. Sizes of `bias_size` are 1 or the full one; empty vectors: the tensor is not given.
struct Case {
  std::int64_t batch = 1, heads_q = 1, heads_kv = 1, d_qk = 16, d_v = 16;
  std::vector<std::int64_t> q_shape{37}, k_shape{53};
  anyflash::Options options;  // rule, align, scale, softcap, threads
  std::function<bool(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j)> sees;  // the rule, said again
  std::function<double(std::int64_t i, std::int64_t j)> distance;                            // for ALiBi
  ElementType type = ElementType::float32, bias_type = ElementType::float32;
  std::int64_t bias_size[4] = {0, 0, 0, 0};
  bool with_sink = false, with_alibi = false, with_dlse = false;
  Numbers q, k, v, dout, dlse, bias, sink, slopes;

  std::int64_t queries() const { return product(q_shape); }
  std::int64_t keys() const { return product(k_shape); }
  std::int64_t rows() const { return batch * heads_q * queries(); }
  bool with_bias() const { return bias_size[0] > 0; }
  std::int64_t bias_at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::int64_t at[4] = {b, h, i, j};
    std::int64_t flat = 0;
    for (int axis = 0; axis < 4; ++axis) flat = flat * bias_size[axis] + (bias_size[axis] > 1 ? at[axis] : 0);
    return flat;
  }
  static std::int64_t product(const std::vector<std::int64_t>& shape) {
    std::int64_t n = 1;
    for (auto s : shape) n *= s;
    return n;
  }

  /// Draws the numbers, each representable in its tensor's type.
  void fill(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    const auto draw = [&](std::int64_t count, ElementType t) {
      Numbers x(count);
      for (auto& value : x) value = rounded(normal(random), t);
      return x;
    };
    const auto statistic = type == ElementType::float64 ? ElementType::float64 : ElementType::float32;
    q = draw(rows() * d_qk, type);
    k = draw(batch * heads_kv * keys() * d_qk, type);
    v = draw(batch * heads_kv * keys() * d_v, type);
    dout = draw(rows() * d_v, type);
    if (with_dlse) dlse = draw(rows(), statistic);
    if (with_bias()) bias = draw(bias_size[0] * bias_size[1] * bias_size[2] * bias_size[3], bias_type);
    if (with_sink) sink = draw(heads_q, statistic);
    if (with_alibi) {
      slopes = draw(heads_q, statistic);
      for (auto& s : slopes) s = std::fabs(s) / 4;
      for (auto& s : slopes) s = rounded(s, statistic);
    }
  }
};

struct Result {
  Numbers out, lse, dq, dk, dv, dbias, dsink;
};

/// out, lse and all gradients by the formulas of the specification, one query at a time.
inline Result reference(const Case& c) {
  Result r;
  const auto n_q = c.queries(), n_k = c.keys();
  r.out.assign(c.rows() * c.d_v, 0);
  r.lse.assign(c.rows(), -infinity);
  r.dq.assign(c.q.size(), 0), r.dk.assign(c.k.size(), 0), r.dv.assign(c.v.size(), 0);
  r.dbias.assign(c.bias.size(), 0), r.dsink.assign(c.sink.size(), 0);
  const double scale = c.options.scale.value_or(1 / std::sqrt(double(c.d_qk))), cap = c.options.softcap;
  std::vector<double> s(n_k), slope(n_k);
  for (std::int64_t row = 0; row < c.rows(); ++row) {
    const auto i = row % n_q, h = row / n_q % c.heads_q, b = row / n_q / c.heads_q;
    const auto g = b * c.heads_kv + h / (c.heads_q / c.heads_kv);
    const double *q = &c.q[row * c.d_qk], *dout = &c.dout[row * c.d_v];
    const auto k = [&](std::int64_t j) { return &c.k[(g * n_k + j) * c.d_qk]; };
    const auto v = [&](std::int64_t j) { return &c.v[(g * n_k + j) * c.d_v]; };
    double m = -infinity, l = 0;
    for (std::int64_t j = 0; j < n_k; ++j) {
      if (!c.sees(b, h, i, j)) continue;
      double x = 0;
      for (std::int64_t e = 0; e < c.d_qk; ++e) x += q[e] * k(j)[e];
      x *= scale;
      if (cap > 0) x = cap * std::tanh(x / cap);
      slope[j] = cap > 0 ? 1 - (x / cap) * (x / cap) : 1;
      if (c.with_bias()) x += c.bias[c.bias_at(b, h, i, j)];
      if (c.with_alibi) x -= c.slopes[h] * c.distance(i, j);
      s[j] = x;
      m = m != m || m > x ? m : x;  // a NaN stays
    }
    if (m == -infinity) continue;
    if (c.with_sink && m < c.sink[h]) m = c.sink[h];
    for (std::int64_t j = 0; j < n_k; ++j)
      if (c.sees(b, h, i, j)) l += std::exp(s[j] - m);
    if (c.with_sink) l += std::exp(c.sink[h] - m);
    const double lse = r.lse[row] = m + std::log(l);
    double* out = &r.out[row * c.d_v];
    for (std::int64_t j = 0; j < n_k; ++j)
      if (c.sees(b, h, i, j))
        for (std::int64_t e = 0; e < c.d_v; ++e) out[e] += std::exp(s[j] - lse) * v(j)[e];
    double shift = c.with_dlse ? c.dlse[row] : 0;
    for (std::int64_t e = 0; e < c.d_v; ++e) shift -= dout[e] * out[e];
    for (std::int64_t j = 0; j < n_k; ++j) {
      if (!c.sees(b, h, i, j)) continue;
      const double p = std::exp(s[j] - lse);
      double dp = shift;
      for (std::int64_t e = 0; e < c.d_v; ++e) {
        dp += dout[e] * v(j)[e];
        r.dv[(g * n_k + j) * c.d_v + e] += p * dout[e];
      }
      if (c.with_bias()) r.dbias[c.bias_at(b, h, i, j)] += p * dp;
      const double ds = p * dp * slope[j] * scale;
      for (std::int64_t e = 0; e < c.d_qk; ++e) {
        r.dq[row * c.d_qk + e] += ds * k(j)[e];
        r.dk[(g * n_k + j) * c.d_qk + e] += ds * q[e];
      }
    }
    if (c.with_sink) r.dsink[h] += std::exp(c.sink[h] - lse) * shift;
  }
  return r;
}

/// Memory of one tensor with guard elements around it and between its rows, which must stay as they were.
struct Tensor {
  std::vector<char> memory;
  TensorView view;
  std::vector<std::int64_t> place;  // of each number of the row-major (b, h, n, d) list, in elements
  ElementType type = ElementType::float32;

  void* data() { return memory.data() + guard * bytes_of(type); }
  static constexpr std::int64_t guard = 5;  // odd: the data is aligned to its element and no more

  /// A tensor (b, h, n..., d) in the layout, each innermost line followed by `gap` elements that are nobody's.
  static Tensor laid_out(Layout layout, std::int64_t b, std::int64_t h, const std::vector<std::int64_t>& shape,
                         std::int64_t d, ElementType type, std::int64_t gap) {
    const auto n = Case::product(shape);
    const auto dims = static_cast<int>(shape.size());
    std::int64_t sb, sh, sn, sd;
    std::int64_t total;
    if (layout == Layout::bhds) {
      sd = n + gap, sn = 1, sh = d * sd, sb = h * sh, total = b * sb;
    } else if (layout == Layout::bshd) {
      sd = 1, sh = d + gap, sn = h * sh, sb = n * sn, total = b * sb;
    } else {
      sd = 1, sn = d + gap, sh = n * sn, sb = h * sh, total = b * sb;
    }
    Tensor t;
    t.type = type;
    t.memory.assign((total + 2 * guard) * bytes_of(type), char(0x5a));
    t.view.data = t.data();
    t.view.type = type;
    t.view.rank = 3 + dims;
    int axis = 0;
    const auto add = [&](std::int64_t size, std::int64_t stride) {
      t.view.shape[axis] = size;
      t.view.strides[axis++] = stride;
    };
    const auto add_sequence = [&] {
      for (int i = 0; i < dims; ++i) {
        std::int64_t inner = 1;
        for (int later = i + 1; later < dims; ++later) inner *= shape[later];
        add(shape[i], sn * inner);
      }
    };
    add(b, sb);
    if (layout == Layout::bshd) add_sequence();
    add(h, sh);
    if (layout == Layout::bhds) add(d, sd);
    if (layout != Layout::bshd) add_sequence();
    if (layout != Layout::bhds) add(d, sd);
    for (std::int64_t ib = 0; ib < b; ++ib)
      for (std::int64_t ih = 0; ih < h; ++ih)
        for (std::int64_t in = 0; in < n; ++in)
          for (std::int64_t id = 0; id < d; ++id) t.place.push_back(ib * sb + ih * sh + in * sn + id * sd);
    return t;
  }

  /// A contiguous tensor of any shape.
  static Tensor plain(std::initializer_list<std::int64_t> shape, ElementType type) {
    Tensor t;
    t.type = type;
    std::int64_t n = 1;
    for (auto s : shape) n *= s;
    t.memory.assign((n + 2 * guard) * bytes_of(type), char(0x5a));
    t.view = TensorView(t.data(), type, shape);
    for (std::int64_t i = 0; i < n; ++i) t.place.push_back(i);
    return t;
  }

  Tensor& set(const Numbers& x) {
    for (std::size_t i = 0; i < x.size(); ++i) store(data(), type, place[i], x[i]);
    return *this;
  }
  Numbers get() {
    Numbers x(place.size());
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = load(data(), type, place[i]);
    return x;
  }
  /// True if every byte outside the tensor's own elements still holds the pattern.
  bool guards_hold() const {
    const auto size = bytes_of(type);
    std::vector<bool> own(memory.size() / size, false);
    for (auto p : place) own[guard + p] = true;
    for (std::size_t i = 0; i < memory.size(); ++i)
      if (!own[i / size] && memory[i] != char(0x5a)) return false;
    return true;
  }
};

struct Wanted {
  bool dq = true, dk = true, dv = true, dbias = true, dsink = true;
};

/// The library's gradients of a case whose out and lse are `forward`'s. Gradients that are not wanted come back empty.
/// `guards` tells whether the memory around every gradient stayed untouched.
inline Result gradients(const Case& c, const Result& forward, Wanted wanted = {}, std::int64_t gap = 0,
                        bool* guards = nullptr) {
  const auto statistic = c.type == ElementType::float64 ? ElementType::float64 : ElementType::float32;
  const auto layout = c.options.layout;
  const auto tensor = [&](std::int64_t heads, const std::vector<std::int64_t>& shape, std::int64_t d) {
    return Tensor::laid_out(layout, c.batch, heads, shape, d, c.type, gap);
  };
  Tensor q = tensor(c.heads_q, c.q_shape, c.d_qk), k = tensor(c.heads_kv, c.k_shape, c.d_qk);
  Tensor v = tensor(c.heads_kv, c.k_shape, c.d_v), out = tensor(c.heads_q, c.q_shape, c.d_v);
  Tensor dq = q, dk = k, dv = v, dout = out;
  for (Tensor* t : {&dq, &dk, &dv, &dout}) t->view.data = t->data();
  q.set(c.q), k.set(c.k), v.set(c.v), out.set(forward.out), dout.set(c.dout);
  Tensor lse = Tensor::plain({c.batch, c.heads_q, c.queries()}, statistic).set(forward.lse);
  lse.view.data = lse.data();
  anyflash::Options options = c.options;
  Tensor bias, dbias, sink, dsink, slopes, dlse;
  anyflash::BackwardInputs inputs{dout.view, out.view, lse.view, {}};
  anyflash::Gradients gradient;
  if (c.with_dlse) {
    dlse = Tensor::plain({c.batch, c.heads_q, c.queries()}, statistic).set(c.dlse);
    inputs.dlse = dlse.view, inputs.dlse.data = dlse.data();
  }
  if (c.with_bias()) {
    bias = Tensor::plain({c.bias_size[0], c.bias_size[1], c.bias_size[2], c.bias_size[3]}, c.bias_type);
    dbias = bias;
    bias.set(c.bias);
    options.bias = bias.view, options.bias.data = bias.data();
    if (wanted.dbias) gradient.dbias = dbias.view, gradient.dbias.data = dbias.data();
  }
  if (c.with_sink) {
    sink = Tensor::plain({c.heads_q}, statistic);
    dsink = sink;
    sink.set(c.sink);
    options.sink = sink.view, options.sink.data = sink.data();
    if (wanted.dsink) gradient.dsink = dsink.view, gradient.dsink.data = dsink.data();
  }
  if (c.with_alibi) {
    slopes = Tensor::plain({c.heads_q}, statistic).set(c.slopes);
    options.alibi_slopes = slopes.view, options.alibi_slopes.data = slopes.data();
  }
  if (wanted.dq) gradient.dq = dq.view;
  if (wanted.dk) gradient.dk = dk.view;
  if (wanted.dv) gradient.dv = dv.view;
  anyflash::backward(inputs, q.view, k.view, v.view, gradient, options);
  if (guards) {
    *guards = dq.guards_hold() && dk.guards_hold() && dv.guards_hold();
    if (c.with_bias()) *guards = *guards && dbias.guards_hold();
  }
  Result r;
  if (wanted.dq) r.dq = dq.get();
  if (wanted.dk) r.dk = dk.get();
  if (wanted.dv) r.dv = dv.get();
  if (wanted.dbias && c.with_bias()) r.dbias = dbias.get();
  if (wanted.dsink && c.with_sink) r.dsink = dsink.get();
  return r;
}

/// Largest |a - b| over the largest |b|, or over 1 where a gradient is nearly nothing; infinite where just one is NaN.
inline double relative_error(const Numbers& a, const Numbers& b) {
  if (a.size() != b.size()) return infinity;
  double worst = 0, size = 1;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) != std::isnan(b[i])) return infinity;
    if (std::isnan(a[i]) || a[i] == b[i]) continue;
    worst = std::fmax(worst, std::fabs(a[i] - b[i]));
    if (std::isnan(worst)) return infinity;
  }
  for (double x : b)
    if (std::isfinite(x)) size = std::fmax(size, std::fabs(x));
  return worst / size;
}

/// What a gradient may be off by, relative to its largest entry.
inline double tolerance(ElementType type) {
  switch (type) {
    case ElementType::float64: return 2e-13;
    case ElementType::float32: return 4e-6;
    case ElementType::float16: return 2e-3;
    default: return 1.6e-2;
  }
}

inline bool same_bits(const Numbers& a, const Numbers& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

inline std::function<bool(std::int64_t, std::int64_t, std::int64_t, std::int64_t)> everything() {
  return [](auto, auto, auto, auto) { return true; };
}

}  // namespace backward_test
