#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>

#include "numbers.h"

namespace anyflash::cli {

namespace {

struct Manner {
  bool exact = false;
  bool last_first = false;  // the order of all sums
  bool recompute = false;   // backward from forward's results: P = exp(S - lse), sum(dO O) instead of sum(P dP)
};

// Sums, and the sums of their terms' absolute values.
template <class A>
struct Sums {
  std::vector<A> value, size;

  Sums(std::size_t count, bool with_sizes) : value(count), size(with_sizes ? count : 0) {}
  void add(std::int64_t at, A term, A term_size) {
    value[std::size_t(at)] += term;
    if (!size.empty()) size[std::size_t(at)] += std::fabs(term_size);
  }
  double largest_size() const { return size.empty() ? 0 : double(*std::max_element(size.begin(), size.end())); }
};

// One (batch, head) at a time; A is the type of the sums.
template <class A>
class Textbook {
 public:
  Textbook(const ReferenceCase& given, Manner manner)
      : c_(given),
        manner_(manner),
        round_(!manner.exact && element_size(given.type) == 2),
        s_(std::size_t(c_.queries * c_.keys)),
        p_(s_.size()),
        cap_slope_(s_.size()),
        out_(std::size_t(rows() * c_.d_v), manner.exact),
        dq_(c_.dout.empty() ? 0 : c_.q.size(), manner.exact),
        dk_(c_.dout.empty() ? 0 : c_.k.size(), manner.exact),
        dv_(c_.dout.empty() ? 0 : c_.v.size(), manner.exact),
        dbias_(c_.dout.empty() ? 0 : c_.bias.size(), manner.exact),
        dsink_(c_.dout.empty() ? 0 : c_.sink.size(), manner.exact) {
    result_.lse.resize(std::size_t(rows()));
    result_.row_max.resize(std::size_t(rows()));
    result_.row_sum.resize(std::size_t(rows()));
  }

  ReferenceResult run() {
    for (std::int64_t b = 0; b < c_.batch; ++b)
      for (std::int64_t h = 0; h < c_.heads_q; ++h) {
        scores(b, h);
        for (std::int64_t i = 0; i < c_.queries; ++i) softmax_row(b, h, i);
        if (c_.dout.empty()) continue;
        for (std::int64_t i = 0; i < c_.queries; ++i) backward_row(b, h, turn(i, c_.queries));
      }
    give("out", out_, result_.out, true);
    give("dq", dq_, result_.dq, true);
    give("dk", dk_, result_.dk, true);
    give("dv", dv_, result_.dv, true);
    give("dbias", dbias_, result_.dbias, false);  // in a type of its own
    give("dsink", dsink_, result_.dsink, false);
    result_.terms["lse"] = result_.terms["row_max"] = double(largest_score_);
    return std::move(result_);
  }

 private:
  // Values stored between two steps of the textbook formula have the inputs' type.
  A keep(A x) const { return round_ ? A(rounded(c_.type, double(x))) : x; }
  std::int64_t turn(std::int64_t i, std::int64_t n) const { return manner_.last_first ? n - 1 - i : i; }

  void give(const std::string& name, const Sums<A>& sums, WideArray& to, bool kept) {
    for (const A x : sums.value) to.push_back(kept ? keep(x) : x);
    result_.terms[name] = sums.largest_size();
  }

  std::int64_t rows() const { return c_.batch * c_.heads_q * c_.queries; }
  std::int64_t q_row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return (b * c_.heads_q + h) * c_.queries + i;
  }
  std::int64_t k_row(std::int64_t b, std::int64_t h, std::int64_t j) const {
    return (b * c_.heads_kv + h / (c_.heads_q / c_.heads_kv)) * c_.keys + j;
  }
  std::size_t mask_of(std::int64_t b, std::int64_t h) const {
    return std::size_t(c_.mask_of[std::size_t(b * c_.heads_q + h)]);
  }
  std::int64_t bias_index(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::int64_t at[4] = {b, h, i, j};
    std::int64_t index = 0;
    for (int axis = 0; axis < 4; ++axis) index = index * c_.bias_size[axis] + (c_.bias_size[axis] > 1 ? at[axis] : 0);
    return index;
  }
  template <class X>
  A dot(const X* a, const double* b, std::int64_t n) const {
    A sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += A(a[turn(i, n)]) * A(b[turn(i, n)]);
    return sum;
  }

  A score(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
    const auto at = std::size_t(i * c_.keys + j);
    const double* q = &c_.q[std::size_t(q_row(b, h, i) * c_.d_qk)];
    const double* k = &c_.k[std::size_t(k_row(b, h, j) * c_.d_qk)];
    const A bias = c_.bias.empty() ? A(0) : A(c_.bias[std::size_t(bias_index(b, h, i, j))]);
    const A slope = c_.slopes.empty() ? A(0) : A(c_.slopes[std::size_t(b * c_.heads_q + h)]);
    const A penalty = c_.slopes.empty() ? A(0) : slope * A(c_.distances[mask_of(b, h)][at]);
    A s = keep(dot(q, k, c_.d_qk) * A(c_.scale));
    if (c_.softcap > 0) {
      const A t = std::tanh(s / A(c_.softcap));
      cap_slope_[at] = 1 - t * t;
      s = keep(A(c_.softcap) * t);
    }
    if (!c_.bias.empty()) s = keep(s + bias);
    if (!c_.slopes.empty()) s = keep(s - penalty);
    if (manner_.exact) {
      A size = std::fabs(bias) + std::fabs(penalty);
      for (std::int64_t c = 0; c < c_.d_qk; ++c) size += std::fabs(A(c_.scale) * A(q[c]) * A(k[c]));
      if (std::isfinite(size)) largest_score_ = std::max(largest_score_, size);
    }
    return s;
  }

  // S = scale q k^T, capped, biased; -inf where hidden.
  void scores(std::int64_t b, std::int64_t h) {
    const auto& visible = c_.masks[mask_of(b, h)];
    for (std::int64_t i = 0; i < c_.queries; ++i)
      for (std::int64_t j = 0; j < c_.keys; ++j) {
        const auto at = std::size_t(i * c_.keys + j);
        cap_slope_[at] = 1;
        s_[at] = visible[at] ? score(b, h, i, j) : -std::numeric_limits<A>::infinity();
      }
  }

  void softmax_row(std::int64_t b, std::int64_t h, std::int64_t i) {
    const auto first = std::size_t(i * c_.keys);
    const auto row = q_row(b, h, i);
    const A *s = &s_[first], nothing = -std::numeric_limits<A>::infinity();
    A* p = &p_[first];
    A m = nothing, l = 0;
    for (std::int64_t j = 0; j < c_.keys; ++j) m = std::max(m, s[j]);
    const auto* const visible = &c_.masks[mask_of(b, h)][first];
    if (!c_.sink.empty() && std::any_of(visible, visible + c_.keys, [](auto bit) { return bit != 0; })) {
      m = std::max(m, A(c_.sink[std::size_t(h)]));
      if (m != nothing) l = std::exp(A(c_.sink[std::size_t(h)]) - m);
    }
    const bool empty = m == nothing;  // it sees no key, or only keys with a score of -inf, and has no sink above that
    for (std::int64_t n = 0; n < c_.keys; ++n) {
      const auto j = turn(n, c_.keys);
      p[j] = empty ? A(0) : std::exp(s[j] - m);
      l += p[j];
    }
    for (std::int64_t j = 0; j < c_.keys; ++j) p[j] = empty ? A(0) : keep(p[j] / l);
    for (std::int64_t n = 0; n < c_.keys; ++n) {
      const auto j = turn(n, c_.keys);
      if (p[j] == 0) continue;
      for (std::int64_t c = 0; c < c_.d_v; ++c) {
        const A term = p[j] * A(c_.v[std::size_t(k_row(b, h, j) * c_.d_v + c)]);
        out_.add(row * c_.d_v + c, term, term);
      }
    }
    result_.row_max[std::size_t(row)] = m;
    result_.row_sum[std::size_t(row)] = l;
    result_.lse[std::size_t(row)] = empty ? m : m + std::log(l);
  }

  // dV += P^T dO, dP = dO V^T, dS = P (dP - sum(P dP) + dlse), dQ = scale dS K, dK += scale dS^T Q.
  void backward_row(std::int64_t b, std::int64_t h, std::int64_t i) {
    const auto first = std::size_t(i * c_.keys);
    const auto row = q_row(b, h, i);
    const double* dout = &c_.dout[std::size_t(row * c_.d_v)];
    std::vector<A> dp(std::size_t(c_.keys)), out(std::size_t(c_.d_v));
    for (std::int64_t c = 0; c < c_.d_v; ++c) out[std::size_t(c)] = keep(out_.value[std::size_t(row * c_.d_v + c)]);
    const A lse = A(result_.lse[std::size_t(row)]), dlse = c_.dlse.empty() ? A(0) : A(c_.dlse[std::size_t(row)]);
    if (manner_.recompute)
      for (std::int64_t j = 0; j < c_.keys; ++j)
        if (p_[first + std::size_t(j)] != 0)
          p_[first + std::size_t(j)] = keep(std::exp(s_[first + std::size_t(j)] - lse));
    A delta = 0;
    for (std::int64_t n = 0; n < c_.keys; ++n) {
      const auto j = turn(n, c_.keys);
      const A p = p_[first + std::size_t(j)];
      if (p == 0) continue;
      dp[std::size_t(j)] = keep(dot(dout, &c_.v[std::size_t(k_row(b, h, j) * c_.d_v)], c_.d_v));
      delta += p * dp[std::size_t(j)];
    }
    // In the opposite order to dp: otherwise both would round alike where P is 1.
    if (manner_.recompute) {
      delta = 0;
      for (std::int64_t c = 0; c < c_.d_v; ++c) {
        const auto at = std::size_t(c_.d_v - 1 - turn(c, c_.d_v));
        delta += A(dout[at]) * out[at];
      }
    }
    for (std::int64_t n = 0; n < c_.keys; ++n) backward_pair(b, h, i, turn(n, c_.keys), dp, delta, dlse);
    if (c_.sink.empty() || std::isinf(lse)) return;
    const A p = std::exp(A(c_.sink[std::size_t(h)]) - lse);
    dsink_.add(h, p * (dlse - delta), p * (std::fabs(dlse) + std::fabs(delta)));
  }

  void backward_pair(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, const std::vector<A>& dp, A delta,
                     A dlse) {
    const auto at = std::size_t(i * c_.keys + j);
    const A p = p_[at];
    if (p == 0) return;
    const auto row = q_row(b, h, i), key = k_row(b, h, j);
    const A ds = keep(p * (dp[std::size_t(j)] - delta + dlse));
    const A ds_size = p * (std::fabs(dp[std::size_t(j)]) + std::fabs(delta) + std::fabs(dlse));
    const A dqk = keep(ds * cap_slope_[at]) * A(c_.scale), dqk_size = ds_size * cap_slope_[at] * A(c_.scale);
    for (std::int64_t c = 0; c < c_.d_v; ++c) {
      const A term = p * A(c_.dout[std::size_t(row * c_.d_v + c)]);
      dv_.add(key * c_.d_v + c, term, term);
    }
    for (std::int64_t c = 0; c < c_.d_qk; ++c) {
      const A k = A(c_.k[std::size_t(key * c_.d_qk + c)]), q = A(c_.q[std::size_t(row * c_.d_qk + c)]);
      dq_.add(row * c_.d_qk + c, dqk * k, dqk_size * k);
      dk_.add(key * c_.d_qk + c, dqk * q, dqk_size * q);
    }
    if (!c_.bias.empty()) dbias_.add(bias_index(b, h, i, j), ds, ds_size);
  }

  const ReferenceCase& c_;
  Manner manner_;
  bool round_;
  std::vector<A> s_, p_, cap_slope_;
  Sums<A> out_, dq_, dk_, dv_, dbias_, dsink_;
  A largest_score_ = 0;
  ReferenceResult result_;
};

struct Coordinates {
  std::vector<std::int64_t> position,
      total;  // per entry: its place in its document, and that document's number of entries on this side
  std::map<std::int64_t, std::int64_t> documents;
};

Coordinates positions(const std::vector<std::int64_t>& ids) {
  Coordinates result;
  for (const auto id : ids) result.position.push_back(result.documents[id]++);
  for (const auto id : ids) result.total.push_back(result.documents[id]);
  return result;
}

std::int64_t aligned(std::int64_t c, std::int64_t size, std::int64_t joint, Align align) {
  switch (align) {
    case Align::none_front: return c;
    case Align::none_end: return c + joint - size;
    case Align::scale_front: return c * (joint / size);
    default: return (c + 1) * (joint / size) - 1;
  }
}

// Aligned coordinates of one side, [dimension][flat entry].
std::vector<std::vector<std::int64_t>> side(const SequenceShape& shape, const SequenceShape& other, Align align) {
  std::int64_t total = 1;
  for (const auto size : shape) total *= size;
  std::vector<std::vector<std::int64_t>> result;
  std::int64_t inner = total;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    inner = shape[i] > 0 ? inner / shape[i] : 0;
    auto& list = result.emplace_back();
    for (std::int64_t flat = 0; flat < total; ++flat)
      list.push_back(aligned(flat / inner % shape[i], shape[i], std::max(shape[i], other[i]), align));
  }
  return result;
}

std::vector<std::vector<std::int64_t>> document_side(const std::vector<std::int64_t>& ids,
                                                     const std::vector<std::int64_t>& other, Align align) {
  const auto here = positions(ids);
  auto there = positions(other).documents;
  std::vector<std::int64_t> list;
  for (std::size_t i = 0; i < ids.size(); ++i)
    list.push_back(aligned(here.position[i], here.total[i], std::max(here.total[i], there[ids[i]]), align));
  return {list};
}

}  // namespace

ReferenceResult exact_result(const ReferenceCase& given) { return Textbook<Wide>(given, {true, false, false}).run(); }

std::vector<ReferenceResult> textbook_results(const ReferenceCase& given) {
  std::vector<ReferenceResult> results;
  for (const bool last_first : {false, true})
    for (const bool recompute : {false, true}) {
      const Manner manner{false, last_first, recompute};
      if (given.dout.empty() && recompute) continue;  // the results would not differ
      const bool wide = given.type == ElementType::float64;
      results.push_back(wide ? Textbook<double>(given, manner).run() : Textbook<float>(given, manner).run());
    }
  return results;
}

std::vector<double> aligned_distances(const SequenceShape& q_shape, const SequenceShape& k_shape, Align align,
                                      const std::vector<std::int64_t>& ids_q, const std::vector<std::int64_t>& ids_k) {
  const bool documents = !ids_q.empty() || !ids_k.empty();
  const auto q = documents ? document_side(ids_q, ids_k, align) : side(q_shape, k_shape, align);
  const auto k = documents ? document_side(ids_k, ids_q, align) : side(k_shape, q_shape, align);
  std::vector<double> distances(q[0].size() * k[0].size());
  for (std::size_t i = 0; i < q[0].size(); ++i)
    for (std::size_t j = 0; j < k[0].size(); ++j)
      for (std::size_t dimension = 0; dimension < q.size(); ++dimension)
        distances[i * k[0].size() + j] += double(std::llabs(q[dimension][i] - k[dimension][j]));
  return distances;
}

}  // namespace anyflash::cli
