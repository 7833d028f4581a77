// What a hidden pair holds changes nothing, what a visible pair holds shows; rows that see nothing give no gradient.
#include <gtest/gtest.h>

#include "backward_support.h"

namespace {

using namespace backward_test;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

Case base(ElementType type) {
  Case c;
  c.batch = 1, c.heads_q = 2, c.heads_kv = 1, c.d_qk = 18, c.d_v = 23;
  c.q_shape = {140}, c.k_shape = {150};
  c.type = type;
  c.options.softcap = 3;
  c.with_dlse = c.with_sink = true;
  c.bias_size[0] = c.bias_size[1] = c.bias_size[2] = 1, c.bias_size[3] = 150;
  return c;
}

bool bad_query(std::int64_t i) { return i == 3 || i == 77 || i == 130; }
bool bad_key(std::int64_t j) { return j == 5 || j == 63 || j == 64 || j == 149; }

/// Sets every channel of the entries chosen by `bad` to a NaN or an infinity, in turn.
template <class Bad>
void spoil(Numbers& x, std::int64_t entries, std::int64_t channels, Bad bad) {
  const double poison[] = {nan, infinity, -infinity};
  for (std::size_t i = 0; i < x.size(); ++i)
    if (bad(std::int64_t(i) / channels % entries)) x[i] = poison[i / channels % 3];
}

TEST(BackwardNan, HiddenPairsChangeNothing) {
  for (auto type : {ElementType::float32, ElementType::float64, ElementType::bfloat16, ElementType::float16}) {
    SCOPED_TRACE(anyflash::element_name(type));
    Case c = base(type);
    std::vector<std::uint8_t> mask(140 * 150);
    for (std::int64_t i = 0; i < 140; ++i)
      for (std::int64_t j = 0; j < 150; ++j) mask[i * 150 + j] = !bad_query(i) && !bad_key(j) && (i + j) % 7 != 0;
    c.options.rule = anyflash::dense(TensorView(mask.data(), ElementType::uint8, {140, 150}));
    c.sees = [&](auto, auto, auto i, auto j) { return mask[i * 150 + j] != 0; };
    c.fill(1);
    const Result forward = reference(c), clean = gradients(c, forward);
    EXPECT_LE(relative_error(clean.dq, forward.dq), tolerance(type));
    spoil(c.k, 150, c.d_qk, bad_key);
    spoil(c.v, 150, c.d_v, bad_key);
    spoil(c.bias, 150, 1, bad_key);
    spoil(c.q, 140, c.d_qk, bad_query);
    spoil(c.dout, 140, c.d_v, bad_query);
    spoil(c.dlse, 140, 1, bad_query);
    const Result spoilt = gradients(c, forward);
    EXPECT_TRUE(same_bits(clean.dq, spoilt.dq));
    EXPECT_TRUE(same_bits(clean.dk, spoilt.dk));
    EXPECT_TRUE(same_bits(clean.dv, spoilt.dv));
    EXPECT_TRUE(same_bits(clean.dbias, spoilt.dbias));
    EXPECT_TRUE(same_bits(clean.dsink, spoilt.dsink));
  }
}

// A spoilt visible value must reach exactly those gradients that depend on it.
TEST(BackwardNan, VisiblePairsShow) {
  for (auto type : {ElementType::float32, ElementType::bfloat16}) {
    const char* spoilt_tensor[] = {"q", "k", "v", "dout"};
    for (int which = 0; which < 4; ++which) {
      SCOPED_TRACE(spoilt_tensor[which]);
      Case c = base(type);
      c.bias_size[0] = 0, c.with_sink = false;
      c.options.rule = anyflash::causal();
      c.sees = [](auto, auto, std::int64_t i, std::int64_t j) { return i >= j; };
      c.fill(2);
      if (which == 0) c.q[100 * c.d_qk + 4] = nan;  // head 0, query 100
      if (which == 1) c.k[90 * c.d_qk + 2] = nan;   // key 90
      if (which == 2) c.v[90 * c.d_v + 2] = nan;
      if (which == 3) c.dout[100 * c.d_v + 7] = nan;
      Result expected = reference(c), forward = expected;
      for (auto& x : forward.out) x = rounded(x, type);
      const Result got = gradients(c, forward);
      EXPECT_LE(relative_error(got.dq, expected.dq), tolerance(type)) << "dq";
      EXPECT_LE(relative_error(got.dk, expected.dk), tolerance(type)) << "dk";
      EXPECT_LE(relative_error(got.dv, expected.dv), tolerance(type)) << "dv";
      EXPECT_TRUE(std::isnan(got.dk[(which % 3 ? 90 : 100) * c.d_qk + 4]));
      EXPECT_FALSE(std::isnan(got.dk[120 * c.d_qk + 4]) && which == 0);
    }
  }
}

TEST(BackwardNan, RowsThatSeeNothingGiveNothing) {
  Case c = base(ElementType::float32);
  c.options.rule = anyflash::causal() & ~anyflash::prefix(70);  // queries before 70 see nothing
  c.sees = [](auto, auto, std::int64_t i, std::int64_t j) { return i >= j && j >= 70; };
  c.fill(3);
  const Result forward = reference(c);
  const Result clean = gradients(c, forward);
  EXPECT_LE(relative_error(clean.dk, forward.dk), tolerance(c.type));
  EXPECT_LE(relative_error(clean.dsink, forward.dsink), tolerance(c.type));
  const auto blind = [](std::int64_t i) { return i < 70; };
  spoil(c.q, 140, c.d_qk, blind);
  spoil(c.dout, 140, c.d_v, blind);
  spoil(c.dlse, 140, 1, blind);
  const Result spoilt = gradients(c, forward);
  EXPECT_TRUE(same_bits(clean.dq, spoilt.dq));
  EXPECT_TRUE(same_bits(clean.dk, spoilt.dk));
  EXPECT_TRUE(same_bits(clean.dv, spoilt.dv));
  EXPECT_TRUE(same_bits(clean.dbias, spoilt.dbias));
  EXPECT_TRUE(same_bits(clean.dsink, spoilt.dsink));
  for (std::int64_t i = 0; i < 70 * c.d_qk; ++i) ASSERT_EQ(spoilt.dq[i], 0);
}

TEST(BackwardNan, RowsWhoseScoresAreAllMinusInfinityGiveNothing) {
  Case c = base(ElementType::float32);
  c.sees = everything();
  c.bias_size[2] = 140, c.bias_size[3] = 1;
  c.fill(4);
  for (auto i : {0, 64, 100, 139}) c.bias[i] = -infinity;
  const Result expected = reference(c), got = gradients(c, expected);
  EXPECT_LE(relative_error(got.dq, expected.dq), tolerance(c.type));
  EXPECT_LE(relative_error(got.dk, expected.dk), tolerance(c.type));
  EXPECT_LE(relative_error(got.dv, expected.dv), tolerance(c.type));
  EXPECT_LE(relative_error(got.dbias, expected.dbias), tolerance(c.type));
  EXPECT_LE(relative_error(got.dsink, expected.dsink), tolerance(c.type));
  for (std::int64_t i = 0; i < c.d_v; ++i) c.v[7 * c.d_v + i] = infinity;  // a key of a tile that every query sees
  const Result spoilt = gradients(c, expected);
  for (auto i : {0, 64, 100, 139})
    for (std::int64_t e = 0; e < c.d_qk; ++e) ASSERT_EQ(spoilt.dq[i * c.d_qk + e], 0) << i;
}

}  // namespace
