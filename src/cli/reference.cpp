#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>

#include "numbers.h"

namespace anyflash::cli {

namespace {

// One (batch, head) at a time; A is the type sums are made in.
template <class A>
class Textbook {
 public:
  Textbook(const ReferenceCase& given, Precision precision)
      : c_(given),
        round_(precision == Precision::as_input && element_size(given.type) == 2),
        s_(std::size_t(c_.queries * c_.keys)),
        p_(s_.size()),
        cap_slope_(s_.size()) {
    result_.out.resize(rows() * std::size_t(c_.d_v));
    result_.lse.resize(rows());
    result_.row_max.resize(rows());
    result_.row_sum.resize(rows());
    if (c_.dout.empty()) return;
    dq_.resize(c_.q.size());
    dk_.resize(c_.k.size());
    dv_.resize(c_.v.size());
    dbias_.resize(c_.bias.size());
    dsink_.resize(c_.sink.size());
  }

  ReferenceResult run() {
    for (std::int64_t b = 0; b < c_.batch; ++b)
      for (std::int64_t h = 0; h < c_.heads_q; ++h) {
        scores(b, h);
        for (std::int64_t i = 0; i < c_.queries; ++i) softmax_row(b, h, i);
        if (!c_.dout.empty())
          for (std::int64_t i = 0; i < c_.queries; ++i) backward_row(b, h, i);
      }
    const auto rounded_all = [&](const std::vector<A>& sums, bool with_bias_type = false) {
      WideArray values(sums.begin(), sums.end());
      if (round_ && !with_bias_type)
        std::transform(sums.begin(), sums.end(), values.begin(), [&](A x) { return keep(x); });
      return values;
    };
    result_.dq = rounded_all(dq_);
    result_.dk = rounded_all(dk_);
    result_.dv = rounded_all(dv_);
    result_.dbias = rounded_all(dbias_, true);
    result_.dsink = rounded_all(dsink_, true);
    return std::move(result_);
  }

 private:
  // What is stored in memory between two steps of the textbook has the inputs' type.
  A keep(A x) const { return round_ ? A(rounded(c_.type, double(x))) : x; }

  std::size_t rows() const { return std::size_t(c_.batch * c_.heads_q * c_.queries); }
  std::int64_t q_row(std::int64_t b, std::int64_t h, std::int64_t i) const {
    return (b * c_.heads_q + h) * c_.queries + i;
  }
  std::int64_t k_row(std::int64_t b, std::int64_t h, std::int64_t j) const {
    return (b * c_.heads_kv + h / (c_.heads_q / c_.heads_kv)) * c_.keys + j;
  }
  std::size_t mask_of(std::int64_t b, std::int64_t h) const {
    return std::size_t(c_.mask_of[std::size_t(b * c_.heads_q + h)]);
  }
  std::size_t bias_index(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const std::int64_t at[4] = {b, h, i, j};
    std::int64_t index = 0;
    for (int axis = 0; axis < 4; ++axis) index = index * c_.bias_size[axis] + (c_.bias_size[axis] > 1 ? at[axis] : 0);
    return std::size_t(index);
  }
  static A dot(const double* a, const double* b, std::int64_t n) {
    A sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += A(a[i]) * A(b[i]);
    return sum;
  }

  // S = scale q k^T, capped, biased; -inf where hidden.
  void scores(std::int64_t b, std::int64_t h) {
    const auto& visible = c_.masks[mask_of(b, h)];
    for (std::int64_t i = 0; i < c_.queries; ++i)
      for (std::int64_t j = 0; j < c_.keys; ++j) {
        const auto at = std::size_t(i * c_.keys + j);
        s_[at] = -std::numeric_limits<A>::infinity();
        cap_slope_[at] = 1;
        if (!visible[at]) continue;
        A s = keep(
            dot(&c_.q[std::size_t(q_row(b, h, i) * c_.d_qk)], &c_.k[std::size_t(k_row(b, h, j) * c_.d_qk)], c_.d_qk) *
            A(c_.scale));
        if (c_.softcap > 0) {
          const A t = std::tanh(s / A(c_.softcap));
          cap_slope_[at] = 1 - t * t;
          s = keep(A(c_.softcap) * t);
        }
        if (!c_.bias.empty()) s = keep(s + A(c_.bias[bias_index(b, h, i, j)]));
        if (!c_.slopes.empty())
          s = keep(s - A(c_.slopes[std::size_t(b * c_.heads_q + h)]) * A(c_.distances[mask_of(b, h)][at]));
        s_[at] = s;
      }
  }

  void softmax_row(std::int64_t b, std::int64_t h, std::int64_t i) {
    const auto first = std::size_t(i * c_.keys), row = std::size_t(q_row(b, h, i));
    A* p = &p_[first];
    A m = -std::numeric_limits<A>::infinity();
    for (std::int64_t j = 0; j < c_.keys; ++j) m = std::max(m, s_[first + std::size_t(j)]);
    const bool empty = std::isinf(m) && m < 0;
    A l = 0;
    if (!empty && !c_.sink.empty()) {
      m = std::max(m, A(c_.sink[std::size_t(h)]));
      l = std::exp(A(c_.sink[std::size_t(h)]) - m);
    }
    for (std::int64_t j = 0; j < c_.keys; ++j) l += p[j] = empty ? A(0) : std::exp(s_[first + std::size_t(j)] - m);
    for (std::int64_t j = 0; j < c_.keys; ++j) p[j] = empty ? A(0) : keep(p[j] / l);
    for (std::int64_t c = 0; c < c_.d_v; ++c) {
      A sum = 0;
      for (std::int64_t j = 0; j < c_.keys; ++j)
        if (!empty && p[j] != 0) sum += p[j] * A(c_.v[std::size_t(k_row(b, h, j) * c_.d_v + c)]);
      result_.out[row * std::size_t(c_.d_v) + std::size_t(c)] = keep(sum);
    }
    result_.row_max[row] = m;
    result_.row_sum[row] = l;
    result_.lse[row] = empty ? m : m + std::log(l);
  }

  // dV += P^T dO, dP = dO V^T, dS = P (dP - sum(P dP) + dlse), dQ = scale dS K, dK += scale dS^T Q.
  void backward_row(std::int64_t b, std::int64_t h, std::int64_t i) {
    const auto first = std::size_t(i * c_.keys);
    const auto row = q_row(b, h, i);
    const double* dout = &c_.dout[std::size_t(row * c_.d_v)];
    std::vector<A> dp(std::size_t(c_.keys));
    A delta = 0;
    for (std::int64_t j = 0; j < c_.keys; ++j) {
      const A p = p_[first + std::size_t(j)];
      if (p == 0) continue;
      dp[std::size_t(j)] = keep(dot(dout, &c_.v[std::size_t(k_row(b, h, j) * c_.d_v)], c_.d_v));
      delta += p * dp[std::size_t(j)];
    }
    const A dlse = c_.dlse.empty() ? A(0) : A(c_.dlse[std::size_t(row)]);
    for (std::int64_t j = 0; j < c_.keys; ++j) {
      const A p = p_[first + std::size_t(j)];
      if (p == 0) continue;
      const auto key = k_row(b, h, j);
      const A ds = keep(p * (dp[std::size_t(j)] - delta + dlse));
      const A dqk = keep(ds * cap_slope_[first + std::size_t(j)]) * A(c_.scale);
      for (std::int64_t c = 0; c < c_.d_v; ++c) dv_[std::size_t(key * c_.d_v + c)] += p * A(dout[c]);
      for (std::int64_t c = 0; c < c_.d_qk; ++c) {
        dq_[std::size_t(row * c_.d_qk + c)] += dqk * A(c_.k[std::size_t(key * c_.d_qk + c)]);
        dk_[std::size_t(key * c_.d_qk + c)] += dqk * A(c_.q[std::size_t(row * c_.d_qk + c)]);
      }
      if (!c_.bias.empty()) dbias_[bias_index(b, h, i, j)] += ds;
    }
    const A lse = A(result_.lse[std::size_t(row)]);
    if (!c_.sink.empty() && !std::isinf(lse))
      dsink_[std::size_t(h)] += std::exp(A(c_.sink[std::size_t(h)]) - lse) * (dlse - delta);
  }

  const ReferenceCase& c_;
  bool round_;
  std::vector<A> s_, p_, cap_slope_;
  std::vector<A> dq_, dk_, dv_, dbias_, dsink_;
  ReferenceResult result_;
};

struct Coordinates {
  std::vector<std::int64_t> position,
      total;  // of each entry: in its document, and that document's entries on this side
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

ReferenceResult reference(const ReferenceCase& given, Precision precision) {
  if (precision == Precision::exact) return Textbook<Wide>(given, precision).run();
  if (given.type == ElementType::float64) return Textbook<double>(given, precision).run();
  return Textbook<float>(given, precision).run();
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
