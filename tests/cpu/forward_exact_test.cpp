// What must hold to the bit: the same results for any number of threads, caches of any size and whatever else is in the
// batch; hidden keys change nothing; NaN and infinity show where the formula has them; rows that see nothing.
#include <gtest/gtest.h>

#include <cstdlib>

#include "cpu/backend.h"
#include "cpu/caches.h"
#include "forward_support.h"

namespace {

using namespace forward_test;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr ElementType all_types[] = {ElementType::float16, ElementType::bfloat16, ElementType::float32,
                                     ElementType::float64};

Case base(ElementType type) {
  Case c;
  c.batch = 3, c.heads_q = 6, c.heads_kv = 2, c.d_qk = 18, c.d_v = 23;
  c.q_shape = {340}, c.k_shape = {350};
  c.type = type;
  c.with_sink = true;
  c.options.rule = anyflash::causal();
  c.sees = [](auto, auto, std::int64_t i, std::int64_t j) { return i >= j; };
  return c;
}

TEST(ForwardExact, AnyNumberOfThreads) {
  for (auto type : all_types) {
    Case c = base(type);
    c.fill(1);
    c.options.threads = 1;
    const Forward one = forward(c);
    for (const int threads : {2, 3, 7}) {
      c.options.threads = threads;
      EXPECT_TRUE(same_bits(forward(c), one)) << threads << " threads, " << anyflash::element_name(type);
    }
  }
}

TEST(ForwardExact, FewQueriesOfOneHead) {
  for (auto type : all_types) {
    Case c = base(type);
    c.batch = c.heads_q = c.heads_kv = 1;
    c.q_shape = {200}, c.k_shape = {900};
    c.options.align = anyflash::Align::none_end;
    c.fill(1);
    c.options.threads = 1;
    const Forward one = forward(c);
    for (const int threads : {2, 4}) {
      c.options.threads = threads;
      EXPECT_TRUE(same_bits(forward(c), one)) << threads << " threads, " << anyflash::element_name(type);
    }
  }
}

/// Where heads lie beside each other, a task takes several; one of them, with values that overflow, is walked again.
TEST(ForwardExact, FewQueriesOfHeadsBesideEachOther) {
  for (auto type : all_types)
    for (const std::int64_t keys : {20, 197, 2500}) {
      SCOPED_TRACE(testing::Message() << keys << " " << anyflash::element_name(type));
      Case c = base(type);
      c.batch = 2, c.heads_q = 12, c.heads_kv = 6, c.d_qk = c.d_v = 64;
      c.q_shape = {2}, c.k_shape = {keys};
      c.options.align = anyflash::Align::none_end;
      c.fill(1);
      for (std::int64_t i = 3 * keys * 64; i < 4 * keys * 64; ++i) c.v[i] = c.v[i] < 0 ? -6e4 : 6e4;
      const Forward apart = forward(c);
      c.options.layout = anyflash::Layout::bshd;
      for (const int threads : {1, 2, 5}) {
        c.options.threads = threads;
        EXPECT_TRUE(same_bits(forward(c), apart)) << threads << " threads";
      }
    }
}

TEST(ForwardExact, CachesOfAnySize) {
  const auto share = anyflash::cpu::cache_share().load();
  EXPECT_GT(share, 0);
  for (auto type : all_types) {
    Case c = base(type);
    c.q_shape = {900};
    c.fill(1);
    const Forward usual = forward(c);
    for (const std::int64_t other : {0, 1 << 16, 1 << 20, 1 << 30}) {
      anyflash::cpu::cache_share() = other;
      EXPECT_TRUE(same_bits(forward(c), usual)) << other << " bytes, " << anyflash::element_name(type);
    }
    anyflash::cpu::cache_share() = share;
  }
}

TEST(ForwardExact, ABatchEntryAlone) {
  Case c = base(ElementType::float32);
  c.fill(2);
  const Forward all = forward(c);
  for (std::int64_t b = 0; b < 3; ++b) {
    Case alone = c;
    alone.batch = 1;
    const auto part = [&](const Numbers& x) {
      return Numbers(x.begin() + b * x.size() / 3, x.begin() + (b + 1) * x.size() / 3);
    };
    alone.q = part(c.q), alone.k = part(c.k), alone.v = part(c.v);
    const Forward one = forward(alone);
    EXPECT_TRUE(backward_test::same_bits(one.out, part(all.out))) << b;
    EXPECT_TRUE(backward_test::same_bits(one.lse, part(all.lse))) << b;
  }
}

bool bad_key(std::int64_t j) { return j == 5 || j == 63 || j == 64 || j == 149 || j == 320; }

/// Sets every channel of the entries chosen by `bad` to a NaN or an infinity, in turn.
template <class Bad>
void spoil(Numbers& x, std::int64_t entries, std::int64_t channels, Bad bad) {
  const double poison[] = {nan, infinity, -infinity};
  for (std::size_t i = 0; i < x.size(); ++i)
    if (bad(std::int64_t(i) / channels % entries)) x[i] = poison[i / channels % 3];
}

TEST(ForwardExact, HiddenKeysChangeNothing) {
  for (auto type : all_types) {
    SCOPED_TRACE(anyflash::element_name(type));
    Case c = base(type);
    c.bias_size[0] = c.bias_size[1] = c.bias_size[2] = 1, c.bias_size[3] = c.keys();
    std::vector<std::uint8_t> mask(c.queries() * c.keys());
    for (std::int64_t i = 0; i < c.queries(); ++i)
      for (std::int64_t j = 0; j < c.keys(); ++j) mask[i * c.keys() + j] = !bad_key(j) && (i + j) % 7 != 0;
    c.options.rule = anyflash::dense(TensorView(mask.data(), ElementType::uint8, {c.queries(), c.keys()}));
    for (const double cap : {0.0, 3.0}) {
      c.options.softcap = cap;
      c.fill(3);
      const Forward clean = forward(c);
      spoil(c.k, c.keys(), c.d_qk, bad_key);
      spoil(c.v, c.keys(), c.d_v, bad_key);
      spoil(c.bias, c.keys(), 1, bad_key);
      EXPECT_TRUE(same_bits(forward(c), clean));
    }
  }
}

TEST(ForwardExact, VisibleNanAndInfinityShowAsTheFormulaSays) {
  for (auto type : all_types)
    for (const int which : {0, 1, 2, 3}) {
      SCOPED_TRACE(testing::Message() << anyflash::element_name(type) << " " << which);
      Case c = base(type);
      c.fill(4);
      const auto late = [](std::int64_t e) { return e == 90 || e == 200; };
      if (which == 0) spoil(c.k, c.keys(), c.d_qk, late);
      if (which == 1) spoil(c.v, c.keys(), c.d_v, late);
      if (which == 2) spoil(c.q, c.queries(), c.d_qk, late);
      if (which == 3) spoil(c.v, c.keys(), c.d_v, [](std::int64_t j) { return j == 0; });  // seen in full tiles
      const Result expected = reference(c);
      const Forward got = forward(c);
      EXPECT_LE(relative_error(got.out, expected.out), tolerance(type));
      EXPECT_LE(relative_error(got.lse, expected.lse), tolerance(ElementType::float32));
    }
}

TEST(ForwardExact, RowMaxOfARowWithANanIsNan) {
  Case c = base(ElementType::float32);
  c.batch = 1;
  c.fill(5);
  for (std::int64_t e = 0; e < c.d_qk; ++e) c.q[100 * c.d_qk + e] = nan;
  const Forward got = forward(c);
  EXPECT_TRUE(std::isnan(got.row_max[100]) && std::isnan(got.row_sum[100]) && std::isnan(got.lse[100]));
  EXPECT_FALSE(std::isnan(got.row_max[99]) || std::isnan(got.row_max[101]));
}

TEST(ForwardExact, RowsThatSeeNothingAreZero) {
  for (auto type : all_types)
    for (const bool by_bias : {false, true}) {
      SCOPED_TRACE(testing::Message() << anyflash::element_name(type) << by_bias);
      Case c = base(type);
      const auto blind = [](std::int64_t i) { return i < 3 || i == 100 || (i >= 128 && i < 256); };
      std::vector<std::uint8_t> mask(c.queries() * c.keys(), 1);
      c.fill(6);
      if (by_bias) {
        c.with_sink = false;  // else they see it
        c.options.rule = anyflash::full();
        c.bias_size[0] = c.bias_size[1] = 1, c.bias_size[2] = c.queries(), c.bias_size[3] = c.keys();
        c.bias.assign(c.queries() * c.keys(), 0);
        for (std::size_t at = 0; at < c.bias.size(); ++at)
          if (blind(std::int64_t(at) / c.keys())) c.bias[at] = -infinity;
      } else {
        for (std::size_t at = 0; at < mask.size(); ++at) mask[at] = !blind(std::int64_t(at) / c.keys());
        c.options.rule = anyflash::dense(TensorView(mask.data(), ElementType::boolean, {c.queries(), c.keys()}));
      }
      const Forward got = forward(c);
      for (std::int64_t row = 0; row < c.rows(); ++row) {
        const bool nothing = blind(row % c.queries());
        EXPECT_EQ(got.lse[row] == -infinity && got.row_max[row] == -infinity && got.row_sum[row] == 0, nothing) << row;
        for (std::int64_t e = 0; e < c.d_v; ++e) {
          EXPECT_FALSE(std::isnan(got.out[row * c.d_v + e]));
          EXPECT_TRUE(!nothing || got.out[row * c.d_v + e] == 0);
        }
      }
    }
}

/// Masks are often added as the lowest number of the type.
TEST(ForwardExact, LowestScoresCountOnlyWhereAllAreLowest) {
  for (const auto type : {ElementType::float32, ElementType::float64})
    for (const std::int64_t queries : {1, 340}) {
      SCOPED_TRACE(testing::Message() << anyflash::element_name(type) << " " << queries);
      Case c = base(type);
      c.with_sink = false, c.bias_type = type;
      c.q_shape = {queries};
      c.options.rule = anyflash::full();
      c.bias_size[0] = c.bias_size[1] = c.bias_size[2] = 1, c.bias_size[3] = c.keys();
      c.fill(8);
      c.bias.assign(c.keys(), 0);
      const auto with_bias = [&](std::int64_t count, double bias) {
        std::fill_n(c.bias.begin(), count, bias);
        return forward(c);
      };
      const bool wide = type == ElementType::float64;
      const double lowest = wide ? std::numeric_limits<double>::lowest() : std::numeric_limits<float>::lowest();
      const Forward hidden = with_bias(64, -infinity);  // a whole block of keys
      EXPECT_TRUE(same_bits(with_bias(64, lowest), hidden));
      const Forward all = with_bias(c.keys(), lowest);
      for (std::int64_t row = 0; row < c.rows(); ++row) {
        EXPECT_NEAR(all.row_sum[row], double(c.keys()), 1e-3);
        EXPECT_EQ(all.row_max[row], lowest);
      }
    }
}

TEST(ForwardExact, AnUnknownInstructionSetIsAnError) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";  // a fresh process, where nothing has been chosen yet
  EXPECT_EXIT(
      {
        setenv("ANYFLASH_ISA", "NOPE", 1);
        try {
          anyflash::cpu::choose_instruction_set();
        } catch (const anyflash::Error& error) {
          std::fprintf(stderr, "%s", error.what());
          std::_Exit(3);
        }
      },
      testing::ExitedWithCode(3), "ANYFLASH_ISA: NOPE");
}

}  // namespace
