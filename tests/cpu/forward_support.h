// The library's forward pass on a case of backward_support.h.
#pragma once

#include "backward_support.h"

namespace forward_test {

using namespace backward_test;

struct Forward {
  Numbers out, lse, row_sum, row_max;
};

/// Runs the case in its type and layout, each line of memory followed by `gap` elements that are nobody's. `guards`
/// tells whether the memory around the results stayed untouched.
inline Forward forward(const Case& c, std::int64_t gap = 0, bool* guards = nullptr) {
  const auto statistic = c.type == ElementType::float64 ? ElementType::float64 : ElementType::float32;
  const auto tensor = [&](std::int64_t heads, const std::vector<std::int64_t>& shape, std::int64_t d) {
    return Tensor::laid_out(c.options.layout, c.batch, heads, shape, d, c.type, gap);
  };
  Tensor q = tensor(c.heads_q, c.q_shape, c.d_qk), k = tensor(c.heads_kv, c.k_shape, c.d_qk);
  Tensor v = tensor(c.heads_kv, c.k_shape, c.d_v), out = tensor(c.heads_q, c.q_shape, c.d_v);
  q.set(c.q), k.set(c.k), v.set(c.v);
  Tensor lse = Tensor::plain({c.batch, c.heads_q, c.queries()}, statistic), row_sum = lse, row_max = lse;
  for (Tensor* t : {&q, &k, &v, &out, &lse, &row_sum, &row_max}) t->view.data = t->data();
  anyflash::Options options = c.options;
  Tensor bias, sink, slopes;
  if (c.with_bias()) {
    bias = Tensor::plain({c.bias_size[0], c.bias_size[1], c.bias_size[2], c.bias_size[3]}, c.bias_type).set(c.bias);
    options.bias = bias.view, options.bias.data = bias.data();
  }
  if (c.with_sink) {
    sink = Tensor::plain({c.heads_q}, statistic).set(c.sink);
    options.sink = sink.view, options.sink.data = sink.data();
  }
  if (c.with_alibi) {
    slopes = Tensor::plain({c.heads_q}, statistic).set(c.slopes);
    options.alibi_slopes = slopes.view, options.alibi_slopes.data = slopes.data();
  }
  anyflash::forward(q.view, k.view, v.view, {out.view, lse.view, row_sum.view, row_max.view}, options);
  if (guards) *guards = out.guards_hold() && lse.guards_hold() && row_sum.guards_hold() && row_max.guards_hold();
  return {out.get(), lse.get(), row_sum.get(), row_max.get()};
}

inline bool same_bits(const Forward& a, const Forward& b) {
  return backward_test::same_bits(a.out, b.out) && backward_test::same_bits(a.lse, b.lse) &&
         backward_test::same_bits(a.row_sum, b.row_sum) && backward_test::same_bits(a.row_max, b.row_max);
}

}  // namespace forward_test
