// Gradients against float64 loops: every option in turn and together, all types, grouped heads, odd sizes, layouts, 2-D
// and 3-D sequences; and against finite differences of the textbook's scalar function.
#include <gtest/gtest.h>

#include "cases.h"

namespace {

using namespace backward_test;
using anyflash::Align;

void expect_gradients(Case c, unsigned seed, std::int64_t gap = 0) {
  c.fill(seed);
  Result expected = reference(c);
  Result forward = expected;
  for (auto& x : forward.out) x = rounded(x, c.type);
  bool guards = false;
  const Result got = gradients(c, forward, {}, gap, &guards);
  EXPECT_TRUE(guards) << "wrote beside a gradient";
  const double bar = tolerance(c.type);
  EXPECT_LE(relative_error(got.dq, expected.dq), bar) << "dq";
  EXPECT_LE(relative_error(got.dk, expected.dk), bar) << "dk";
  EXPECT_LE(relative_error(got.dv, expected.dv), bar) << "dv";
  if (c.with_bias()) {
    const double bias_bar = std::max(bar, tolerance(c.bias_type));
    EXPECT_LE(relative_error(got.dbias, expected.dbias), bias_bar) << "dbias";
  }
  if (c.with_sink) {
    EXPECT_LE(relative_error(got.dsink, expected.dsink), bar) << "dsink";
  }
}

TEST(BackwardValues, AllTypesFull) {
  for (auto type : all_types) {
    Case c = base();
    c.type = type;
    expect_gradients(c, 1);
  }
}

TEST(BackwardValues, AllTypesEveryOptionCausal) {
  for (auto type : all_types) {
    SCOPED_TRACE(anyflash::element_name(type));
    Case c = base();
    make_causal(c);
    c.type = c.bias_type = type;
    c.options.softcap = 2.5, c.options.scale = 0.3;
    c.with_sink = c.with_alibi = c.with_dlse = true;
    set_bias(c, true, true, true, true);
    expect_gradients(c, 2);
  }
}

TEST(BackwardValues, EachOptionAlone) {
  for (int option = 0; option < 6; ++option) {
    SCOPED_TRACE(option);
    Case c = base();
    c.type = ElementType::float64;
    if (option == 0) c.options.scale = -0.7;
    if (option == 1) c.options.softcap = 1.5;
    if (option == 2) c.with_alibi = true;
    if (option == 3) c.with_sink = true;
    if (option == 4) c.with_dlse = true;
    if (option == 5) set_bias(c, false, true, true, true);
    expect_gradients(c, 10 + option);
  }
}

TEST(BackwardValues, BiasOverEveryChoiceOfBroadcastAxes) {
  for (int axes = 0; axes < 16; ++axes) {
    SCOPED_TRACE(axes);
    Case c = base();
    make_causal(c);
    c.options.softcap = 3;
    c.with_dlse = true;  // without it a bias that is the same for all keys has no gradient
    c.type = c.bias_type = axes % 2 ? ElementType::float64 : ElementType::float32;
    set_bias(c, axes & 1, axes & 2, axes & 4, axes & 8);
    expect_gradients(c, 20 + axes);
  }
}

TEST(BackwardValues, BiasOfAnotherType) {
  for (auto type : all_types) {
    SCOPED_TRACE(anyflash::element_name(type));
    Case c = base();
    c.bias_type = type;
    set_bias(c, true, false, false, true);
    expect_gradients(c, 40);
  }
}

TEST(BackwardValues, HeadSizes) {
  const std::int64_t sizes[][2] = {{1, 1}, {3, 5}, {17, 64}, {64, 17}, {65, 96}, {128, 128}, {80, 200}, {256, 512}};
  for (auto [d_qk, d_v] : sizes) {
    SCOPED_TRACE(testing::Message() << d_qk << " " << d_v);
    Case c = base();
    make_causal(c);
    c.batch = 1, c.heads_q = 2, c.heads_kv = 1, c.q_shape = {97}, c.k_shape = {70};
    c.d_qk = d_qk, c.d_v = d_v;
    expect_gradients(c, 50);
  }
}

TEST(BackwardValues, SequenceLengths) {
  const std::int64_t sizes[][2] = {{1, 1}, {1, 200}, {200, 1}, {63, 65}, {64, 64}, {65, 63}, {128, 256}, {300, 129}};
  for (auto [n_q, n_k] : sizes) {
    SCOPED_TRACE(testing::Message() << n_q << " " << n_k);
    for (const bool causal : {false, true}) {
      Case c = base();
      if (causal) make_causal(c);
      c.q_shape = {n_q}, c.k_shape = {n_k};
      c.with_dlse = true;  // with one key nothing else has a gradient
      expect_gradients(c, 60);
    }
  }
}

TEST(BackwardValues, KeysThatFillBlocksInPart) {
  for_keys_that_fill_blocks_in_part([](Case& c) {
    c.with_dlse = true;
    expect_gradients(c, 61);
  });
}

TEST(BackwardValues, LayoutsWithGaps) {
  for (auto layout : {Layout::bhsd, Layout::bshd, Layout::bhds})
    for (auto type : all_types) {
      SCOPED_TRACE(testing::Message() << int(layout) << " " << anyflash::element_name(type));
      Case c = base();
      make_causal(c);
      c.type = type;
      c.options.layout = layout;
      expect_gradients(c, 70, 3);
    }
}

TEST(BackwardValues, CausalAlignedAtTheEnd) {
  Case c = base();
  c.q_shape = {77}, c.k_shape = {205};
  c.options.rule = anyflash::causal();
  c.options.align = Align::none_end;
  c.sees = [](auto, auto, std::int64_t i, std::int64_t j) { return i + 205 - 77 >= j; };
  expect_gradients(c, 80);
}

TEST(BackwardValues, LocalWithStride) { expect_gradients(strided_local(), 81); }

TEST(BackwardValues, BoxesInTwoDimensions) {
  for (auto layout : {Layout::bhsd, Layout::bshd, Layout::bhds}) {
    Case c = local_2d(layout);
    c.with_dlse = true;
    expect_gradients(c, 82, 1);
  }
}

TEST(BackwardValues, BoxesInThreeDimensions) {
  for (auto layout : {Layout::bhsd, Layout::bhds}) expect_gradients(local_3d(layout), 83);
}

TEST(BackwardValues, DenseMaskOfEachHead) {
  std::vector<std::uint8_t> mask;
  Case c = masked_heads(mask);
  c.with_dlse = true;
  expect_gradients(c, 84);
}

TEST(BackwardValues, OnlyWhatIsWantedAndTheSameBits) {
  Case c = base();
  make_causal(c);
  c.with_sink = true;
  set_bias(c, false, true, true, true);
  c.fill(90);
  const Result forward = reference(c), all = gradients(c, forward);
  for (int wanted = 1; wanted < 32; ++wanted) {
    SCOPED_TRACE(wanted);
    const Result some = gradients(
        c, forward, {bool(wanted & 1), bool(wanted & 2), bool(wanted & 4), bool(wanted & 8), bool(wanted & 16)});
    EXPECT_TRUE(some.dq.empty() || same_bits(some.dq, all.dq));
    EXPECT_TRUE(some.dk.empty() || same_bits(some.dk, all.dk));
    EXPECT_TRUE(some.dv.empty() || same_bits(some.dv, all.dv));
    EXPECT_TRUE(some.dbias.empty() || same_bits(some.dbias, all.dbias));
    EXPECT_TRUE(some.dsink.empty() || same_bits(some.dsink, all.dsink));
    EXPECT_EQ(some.dq.empty(), !(wanted & 1));
  }
}

TEST(BackwardValues, NoQueriesOrNoKeysLeaveZeroGradients) {
  for (const bool no_keys : {false, true}) {
    Case c = base();
    (no_keys ? c.k_shape : c.q_shape) = {0};
    c.with_sink = true;
    c.bias_size[0] = c.bias_size[2] = c.bias_size[3] = 1, c.bias_size[1] = c.heads_q;
    c.fill(91);
    const Result r = gradients(c, reference(c));
    EXPECT_EQ(r.dq, Numbers(c.q.size(), 0));
    EXPECT_EQ(r.dk, Numbers(c.k.size(), 0));
    EXPECT_EQ(r.dv, Numbers(c.v.size(), 0));
    EXPECT_EQ(r.dbias, Numbers(c.bias.size(), 0));
    EXPECT_EQ(r.dsink, Numbers(c.sink.size(), 0));
  }
}

// L = sum dout * out + sum dlse * lse, differentiated in the middle.
TEST(BackwardValues, FiniteDifferences) {
  Case c = base();
  make_causal(c);
  c.batch = 1, c.q_shape = {70}, c.k_shape = {66}, c.d_qk = 6, c.d_v = 5;
  c.type = c.bias_type = ElementType::float64;
  c.options.softcap = 1.7;
  c.with_sink = c.with_alibi = c.with_dlse = true;
  set_bias(c, false, false, true, true);
  c.fill(92);
  const auto loss = [](const Case& at) {
    const Result r = reference(at);
    double sum = 0;
    for (std::size_t i = 0; i < r.out.size(); ++i) sum += r.out[i] * at.dout[i];
    for (std::size_t i = 0; i < r.lse.size(); ++i) sum += r.lse[i] * at.dlse[i];
    return sum;
  };
  const Result got = gradients(c, reference(c));
  const auto check = [&](const Numbers& gradient, Numbers Case::* member, const char* name) {
    for (std::size_t i = 3; i < gradient.size(); i += gradient.size() / 4 + 1) {
      Case up = c, down = c;
      (up.*member)[i] += 1e-5, (down.*member)[i] -= 1e-5;
      EXPECT_NEAR(gradient[i], (loss(up) - loss(down)) / 2e-5, 1e-7) << name << " " << i;
    }
  };
  check(got.dq, &Case::q, "dq");
  check(got.dk, &Case::k, "dk");
  check(got.dv, &Case::v, "dv");
  check(got.dbias, &Case::bias, "dbias");
  check(got.dsink, &Case::sink, "dsink");
}

}  // namespace
