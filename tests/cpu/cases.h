// Cases that both directions are tested on.
#pragma once

#include "backward_support.h"

namespace backward_test {

inline Case base() {
  Case c;
  c.batch = 2, c.heads_q = 4, c.heads_kv = 2, c.d_qk = 24, c.d_v = 40;
  c.q_shape = {131}, c.k_shape = {150};
  c.sees = everything();
  c.distance = [](std::int64_t i, std::int64_t j) { return std::fabs(double(i - j)); };
  return c;
}

inline void make_causal(Case& c) {
  c.options.rule = anyflash::causal();
  c.sees = [](auto, auto, std::int64_t i, std::int64_t j) { return i >= j; };
}

inline void set_bias(Case& c, bool b, bool h, bool i, bool j) {
  c.bias_size[0] = b ? c.batch : 1;
  c.bias_size[1] = h ? c.heads_q : 1;
  c.bias_size[2] = i ? c.queries() : 1;
  c.bias_size[3] = j ? c.keys() : 1;
}

inline constexpr ElementType all_types[] = {ElementType::float16, ElementType::bfloat16, ElementType::float32,
                                            ElementType::float64};

inline void for_keys_that_fill_blocks_in_part(const std::function<void(Case&)>& expect) {
  const std::int64_t sizes[][2] = {{16, 16}, {5, 16}, {3, 20}, {16, 33}, {2, 63}, {40, 5}, {70, 113}};
  for (auto [n_q, n_k] : sizes)
    for (auto type : all_types)
      for (const bool causal : {false, true}) {
        SCOPED_TRACE(testing::Message() << n_q << " " << n_k << " " << anyflash::element_name(type) << " " << causal);
        Case c = base();
        if (causal) make_causal(c);
        c.type = type, c.d_qk = 64, c.d_v = 32;  // whole vectors: some products read rows where they lie
        c.q_shape = {n_q}, c.k_shape = {n_k};
        expect(c);
      }
}

/// Every fourth key, 9 of them to each side.
inline Case strided_local() {
  Case c = base();
  c.q_shape = {333}, c.k_shape = {333};
  c.options.rule = anyflash::local(9, 2);
  c.sees = [](auto, auto, std::int64_t i, std::int64_t j) { return (i - j) % 4 == 0 && std::abs(i - j) / 4 < 9; };
  return c;
}

/// A window in an image, with all that goes by coordinates.
inline Case local_2d(Layout layout) {
  Case c = base();
  c.q_shape = c.k_shape = {21, 27};
  c.options.layout = layout;
  c.options.rule = anyflash::local(4);
  c.options.softcap = 4;
  c.with_alibi = c.with_sink = true;
  c.sees = [](auto, auto, std::int64_t i, std::int64_t j) {
    return std::abs(i / 27 - j / 27) < 4 && std::abs(i % 27 - j % 27) < 4;
  };
  c.distance = [](std::int64_t i, std::int64_t j) {
    return double(std::abs(i / 27 - j / 27) + std::abs(i % 27 - j % 27));
  };
  set_bias(c, false, true, true, true);
  return c;
}

inline Case local_3d(Layout layout) {
  Case c = base();
  c.q_shape = c.k_shape = {7, 9, 10};
  c.options.layout = layout;
  c.options.rule = anyflash::local(3);
  c.sees = [](auto, auto, std::int64_t i, std::int64_t j) {
    return std::abs(i / 90 - j / 90) < 3 && std::abs(i / 10 % 9 - j / 10 % 9) < 3 && std::abs(i % 10 - j % 10) < 3;
  };
  set_bias(c, false, false, false, true);
  return c;
}

/// A mask of its own for each head; row 70 of batch entry 1, head 2 sees nothing. `mask` must outlive the case.
inline Case masked_heads(std::vector<std::uint8_t>& mask) {
  Case c = base();
  mask.resize(c.batch * c.heads_q * c.queries() * c.keys());
  std::mt19937 random(5);
  for (auto& m : mask) m = random() % 3 == 0;
  const auto at = [=](auto b, auto h, auto i, auto j) {
    return ((b * c.heads_q + h) * c.queries() + i) * c.keys() + j;
  };
  for (std::int64_t j = 0; j < c.keys(); ++j) mask[at(1, 2, 70, j)] = 0;
  c.options.rule =
      anyflash::dense(TensorView(mask.data(), ElementType::boolean, {c.batch, c.heads_q, c.queries(), c.keys()}));
  c.sees = [&mask, at](auto b, auto h, auto i, auto j) { return mask[at(b, h, i, j)] != 0; };
  c.with_sink = true;
  return c;
}

}  // namespace backward_test
