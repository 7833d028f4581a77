// The forward pass against float64 loops: every option, all types, grouped heads, odd sizes, layouts, 2-D and 3-D
// sequences.
#include <gtest/gtest.h>

#include "cases.h"
#include "forward_support.h"

namespace {

using namespace forward_test;
using anyflash::Align;

void expect_forward(Case c, unsigned seed, std::int64_t gap = 0) {
  c.fill(seed);
  const Result expected = reference(c);
  bool guards = false;
  const Forward got = forward(c, gap, &guards);
  EXPECT_TRUE(guards) << "wrote beside a result";
  EXPECT_LE(relative_error(got.out, expected.out), tolerance(c.type)) << "out";
  const double statistic_bar = tolerance(c.type == ElementType::float64 ? ElementType::float64 : ElementType::float32);
  EXPECT_LE(relative_error(got.lse, expected.lse), statistic_bar) << "lse";
  Numbers lse(got.lse.size());
  for (std::size_t i = 0; i < lse.size(); ++i) lse[i] = got.row_max[i] + std::log(got.row_sum[i]);
  EXPECT_LE(relative_error(lse, expected.lse), statistic_bar) << "row_max + log(row_sum)";
}

TEST(ForwardValues, AllTypes) {
  for (auto type : all_types)
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(anyflash::element_name(type));
      Case c = base();
      if (causal) make_causal(c);
      c.type = type;
      expect_forward(c, 1);
    }
}

TEST(ForwardValues, EveryOptionTogether) {
  for (auto type : all_types) {
    SCOPED_TRACE(anyflash::element_name(type));
    Case c = base();
    make_causal(c);
    c.type = c.bias_type = type;
    c.options.softcap = 2.5, c.options.scale = 0.3;
    c.with_sink = c.with_alibi = true;
    set_bias(c, true, true, true, true);
    expect_forward(c, 2);
  }
}

TEST(ForwardValues, EachOptionAlone) {
  for (int option = 0; option < 5; ++option) {
    SCOPED_TRACE(option);
    Case c = base();
    c.type = ElementType::float64;
    if (option == 0) c.options.scale = -0.7;
    if (option == 1) c.options.softcap = 1.5;
    if (option == 2) c.with_alibi = true;
    if (option == 3) c.with_sink = true;
    if (option == 4) set_bias(c, false, true, true, true);
    expect_forward(c, 10 + option);
  }
}

TEST(ForwardValues, BiasOverEveryChoiceOfBroadcastAxesAndTypes) {
  for (int axes = 0; axes < 16; ++axes)
    for (auto type : all_types) {
      SCOPED_TRACE(testing::Message() << axes << " " << anyflash::element_name(type));
      Case c = base();
      c.batch = 2, c.heads_q = 2, c.heads_kv = 1;
      make_causal(c);
      c.type = axes % 2 ? ElementType::float64 : ElementType::float32;
      c.bias_type = type;
      set_bias(c, axes & 1, axes & 2, axes & 4, axes & 8);
      expect_forward(c, 20 + axes);
    }
}

TEST(ForwardValues, HeadSizes) {
  const std::int64_t sizes[][2] = {{1, 1},   {3, 5},    {16, 16},  {17, 64},  {64, 17},
                                   {65, 96}, {80, 200}, {128, 72}, {256, 512}};
  for (auto [d_qk, d_v] : sizes)
    for (auto type : all_types) {
      SCOPED_TRACE(testing::Message() << d_qk << " " << d_v << " " << anyflash::element_name(type));
      Case c = base();
      make_causal(c);
      c.batch = 1, c.heads_q = 2, c.heads_kv = 1, c.q_shape = {97}, c.k_shape = {70};
      c.d_qk = d_qk, c.d_v = d_v, c.type = type;
      expect_forward(c, 50);
    }
}

TEST(ForwardValues, SequenceLengths) {
  const std::int64_t sizes[][2] = {{1, 1},   {1, 200}, {200, 1},   {5, 700},  {63, 65},
                                   {64, 64}, {65, 63}, {128, 256}, {600, 129}};
  for (auto [n_q, n_k] : sizes) {
    SCOPED_TRACE(testing::Message() << n_q << " " << n_k);
    for (const bool causal : {false, true}) {
      Case c = base();
      if (causal) make_causal(c);
      c.q_shape = {n_q}, c.k_shape = {n_k};
      expect_forward(c, 60);
    }
  }
}

TEST(ForwardValues, KeysThatFillBlocksInPart) {
  for_keys_that_fill_blocks_in_part([](const Case& c) { expect_forward(c, 61); });
}

TEST(ForwardValues, GroupedHeads) {
  const std::int64_t heads[][2] = {{8, 8}, {8, 2}, {8, 1}, {6, 3}, {13, 1}};
  for (auto [heads_q, heads_kv] : heads)
    for (const std::int64_t n_q : {1, 7, 100}) {
      SCOPED_TRACE(testing::Message() << heads_q << " " << heads_kv << " " << n_q);
      Case c = base();
      c.heads_q = heads_q, c.heads_kv = heads_kv, c.q_shape = {n_q};
      c.options.rule = anyflash::causal();
      c.options.align = Align::none_end;
      c.sees = [n_q = n_q](auto, auto, std::int64_t i, std::int64_t j) { return i + 150 - n_q >= j; };
      c.with_sink = c.with_alibi = true;
      c.distance = [n_q = n_q](std::int64_t i, std::int64_t j) { return std::fabs(double(i + 150 - n_q - j)); };
      set_bias(c, false, true, true, true);
      expect_forward(c, 65);
    }
}

TEST(ForwardValues, LayoutsWithGaps) {
  for (auto layout : {Layout::bhsd, Layout::bshd, Layout::bhds})
    for (auto type : all_types)
      for (const std::int64_t gap : {0, 3}) {
        SCOPED_TRACE(testing::Message() << int(layout) << " " << anyflash::element_name(type) << " " << gap);
        Case c = base();
        make_causal(c);
        c.type = type;
        c.options.layout = layout;
        c.d_qk = 23, c.d_v = 37;
        expect_forward(c, 70, gap);
      }
}

TEST(ForwardValues, LocalWithStride) { expect_forward(strided_local(), 81); }

TEST(ForwardValues, BoxesInTwoDimensions) {
  for (auto layout : {Layout::bhsd, Layout::bshd, Layout::bhds}) expect_forward(local_2d(layout), 82, 1);
}

TEST(ForwardValues, BoxesInThreeDimensions) {
  for (auto layout : {Layout::bhsd, Layout::bhds}) expect_forward(local_3d(layout), 83);
}

TEST(ForwardValues, DenseMaskOfEachHead) {
  std::vector<std::uint8_t> mask;
  expect_forward(masked_heads(mask), 84);
}

// Scores far apart: the running maximum moves by much, rows underflow before it.
TEST(ForwardValues, LargeScores) {
  for (const double scale : {30.0, -30.0}) {
    Case c = base();
    c.type = ElementType::float64;
    c.q_shape = {70}, c.k_shape = {500};
    c.options.scale = scale;
    expect_forward(c, 85);
  }
}

// Keys and values in pages, in any order, of a different length in each batch entry: the same bits as side by side.
TEST(ForwardValues, PagesGiveTheBitsOfOneTensor) {
  constexpr std::int64_t page = 16, pages = 10, length[2] = {150, 97};
  Case c = base();
  c.k_shape = {page * pages};
  c.options.rule = anyflash::causal();
  c.options.align = Align::none_end;
  c.fill(86);
  std::int64_t lengths[2] = {length[0], length[1]};
  c.options.key_lengths = TensorView(lengths, ElementType::int64, {2});
  const Forward plain = forward(c);

  std::vector<std::int32_t> table(2 * pages);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>((i * 7 + 3) % table.size());
  const auto in_pages = [&](const Numbers& x, std::int64_t d) {
    std::vector<float> memory(x.size(), std::numeric_limits<float>::quiet_NaN());
    for (std::int64_t b = 0; b < 2; ++b)
      for (std::int64_t g = 0; g < c.heads_kv; ++g)
        for (std::int64_t j = 0; j < length[b]; ++j)  // what lies behind the length stays NaN
          for (std::int64_t e = 0; e < d; ++e)
            memory[((table[b * pages + j / page] * page + j % page) * c.heads_kv + g) * d + e] =
                static_cast<float>(x[((b * c.heads_kv + g) * page * pages + j) * d + e]);
    return memory;
  };
  auto k = in_pages(c.k, c.d_qk), v = in_pages(c.v, c.d_v);
  std::vector<float> q(c.q.begin(), c.q.end()), out(c.rows() * c.d_v);
  anyflash::Options options = c.options;
  options.page_table = TensorView(table.data(), ElementType::int32, {2, pages});
  const auto type = ElementType::float32;
  anyflash::ForwardOutputs outputs;
  outputs.out = TensorView(out.data(), type, {2, c.heads_q, c.queries(), c.d_v});
  anyflash::forward(TensorView(q.data(), type, {2, c.heads_q, c.queries(), c.d_qk}),
                    TensorView(k.data(), type, {2 * pages, page, c.heads_kv, c.d_qk}),
                    TensorView(v.data(), type, {2 * pages, page, c.heads_kv, c.d_v}), outputs, options);
  EXPECT_TRUE(backward_test::same_bits(Numbers(out.begin(), out.end()), plain.out));
}

}  // namespace
