// Calls that look odd and are right: empty sizes, outputs between one another in memory, strange strides, garbage that
// is not used.
#include <cmath>
#include <limits>
#include <random>

#include "call.h"

namespace anyflash::wrong_input {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

void fill_random(const TensorView& view, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < view.elements(); ++i) static_cast<float*>(view.data)[i] = normal(random);
}

void expect_all(const TensorView& view, float value) {
  for (std::int64_t i = 0; i < view.elements(); ++i) ASSERT_EQ(static_cast<float*>(view.data)[i], value) << "at " << i;
}

/// A call with some sizes set to 0.
Call call_of_sizes(std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv, std::int64_t queries,
                   std::int64_t keys) {
  Call c;
  c.q = c.input({batch, heads_q, queries, 16});
  c.k = c.input({batch, heads_kv, keys, 16});
  c.v = c.input({batch, heads_kv, keys, 24});
  c.outputs = {c.output({batch, heads_q, queries, 24}), c.output({batch, heads_q, queries}),
               c.output({batch, heads_q, queries}), c.output({batch, heads_q, queries})};
  c.inputs = {c.input({batch, heads_q, queries, 24}),
              c.input({batch, heads_q, queries, 24}),
              c.input({batch, heads_q, queries}),
              {}};
  c.options.bias = c.input({1, heads_q, queries, keys});
  c.options.sink = c.input({heads_q});
  c.gradients = {c.output({batch, heads_q, queries, 16}), c.output({batch, heads_kv, keys, 16}),
                 c.output({batch, heads_kv, keys, 24}), c.output({1, heads_q, queries, keys}), c.output({heads_q})};
  return c;
}

TEST(ZeroSizes, TablesOfNobodyAreNotRead) {
  const auto table = [](ElementType type, std::initializer_list<std::int64_t> shape) {
    return TensorView(nullptr, type, shape);
  };
  const std::int64_t sizes[][2] = {{0, 4}, {2, 0}, {0, 0}};  // batch, heads
  for (const auto& [batch, heads] : sizes) {
    SCOPED_TRACE(testing::PrintToString(batch) + ", " + testing::PrintToString(heads));
    auto c = call_of_sizes(batch, heads, heads, 8, 12);
    const auto ids =
        batch == 0 ? documents(table(ElementType::int32, {0, 8}), table(ElementType::int64, {0, 12})) : full();
    for (const auto& rule : {ids, blocks(table(ElementType::boolean, {batch, heads, 2, 3}), 4, 4),
                             dense(table(ElementType::boolean, {batch, heads, 8, 12}))}) {
      c.options.rule = rule | sink(1);
      c.forward();
      c.backward();
      EXPECT_NO_THROW(plan(c.q, c.k, c.v, c.options));
    }
  }
}

TEST(ZeroSizes, ResultsAreThoseOfNothing) {
  const std::int64_t sizes[][5] = {{0, 4, 2, 8, 12}, {2, 0, 0, 8, 12}, {2, 0, 2, 8, 12}, {2, 4, 2, 0, 12},
                                   {2, 4, 2, 8, 0},  {2, 4, 2, 0, 0},  {0, 0, 0, 0, 0}};
  for (const auto& s : sizes) {
    SCOPED_TRACE(testing::PrintToString(s));
    auto c = call_of_sizes(s[0], s[1], s[2], s[3], s[4]);
    for (const auto& rule : {full(), causal() & local(3), ~full()}) {
      c.options.rule = rule;
      c.forward();
      expect_all(c.outputs.out, 0);
      expect_all(c.outputs.lse, -infinity);
      expect_all(c.outputs.row_max, -infinity);
      expect_all(c.outputs.row_sum, 0);
      c.backward();
      for (const auto& gradient :
           {c.gradients.dq, c.gradients.dk, c.gradients.dv, c.gradients.dbias, c.gradients.dsink}) {
        expect_all(gradient, 0);
      }
    }
  }
}

TEST(ZeroSizes, NullPointersAreFineForNoElements) {
  auto c = call_of_sizes(2, 4, 2, 8, 0);
  c.k.data = c.v.data = c.options.bias.data = c.gradients.dk.data = c.gradients.dv.data = c.gradients.dbias.data =
      nullptr;
  c.forward();
  expect_all(c.outputs.lse, -infinity);
  c.backward();
  expect_all(c.gradients.dq, 0);
}

TEST(ZeroSizes, LayoutsAndDimensions) {
  for (const auto type : {ElementType::float16, ElementType::float64}) {
    Call c;
    c.outputs = {};
    c.options.layout = Layout::bhds;
    c.q = c.input({2, 4, 16, 3, 5}, type);
    c.k = c.input({2, 2, 16, 0, 5}, type);
    c.v = c.input({2, 2, 24, 0, 5}, type);
    c.outputs.out = c.output({2, 4, 24, 3, 5}, type);
    c.forward();
    const auto* bytes = static_cast<const char*>(c.outputs.out.data);
    for (std::size_t i = 0; i < c.outputs.out.elements() * element_size(type); ++i) ASSERT_EQ(bytes[i], 0);
  }
}

TEST(ZeroSizes, QueriesOfABatchEntryWithoutKeys) {
  Call c;
  fill_random(c.q, 1), fill_random(c.k, 2), fill_random(c.v, 3);
  c.options.key_lengths = c.integers({0, 5});
  c.forward();
  auto first = c.outputs.lse;
  first.shape[0] = 1;
  expect_all(first, -infinity);
  EXPECT_TRUE(std::isfinite(static_cast<float*>(c.outputs.lse.data)[32]));
}

TEST(RightInput, GradientsInOnePackedTensor) {
  Call c;
  const auto qkv = c.input({2, 10, 3, 4, 16});
  const auto packed = c.output({2, 10, 3, 4, 16});
  const auto slice = [](const TensorView& all, int part) {
    return TensorView(static_cast<float*>(all.data) + part * 64, ElementType::float32, {2, 10, 4, 16},
                      {1920, 192, 16, 1});
  };
  fill_random(qkv, 7);
  c.options.layout = Layout::bshd;
  c.q = slice(qkv, 0), c.k = slice(qkv, 1), c.v = slice(qkv, 2);
  c.outputs = {c.output({2, 10, 4, 16}), c.output({2, 4, 10}), {}, {}};
  c.forward();
  c.inputs = {c.input({2, 10, 4, 16}), c.outputs.out, c.outputs.lse, {}};
  fill_random(c.inputs.dout, 8);
  c.gradients = {slice(packed, 0), slice(packed, 1), slice(packed, 2), {}, {}};
  c.backward();

  Call apart;
  apart.options = c.options;
  apart.q = c.q, apart.k = c.k, apart.v = c.v, apart.inputs = c.inputs;
  apart.gradients = {apart.output({2, 10, 4, 16}), apart.output({2, 10, 4, 16}), apart.output({2, 10, 4, 16}), {}, {}};
  apart.backward();
  const TensorView* gradients[] = {&apart.gradients.dq, &apart.gradients.dk, &apart.gradients.dv};
  for (std::int64_t token = 0; token < 20; ++token) {
    for (int part = 0; part < 3; ++part) {
      EXPECT_EQ(0, std::memcmp(static_cast<float*>(packed.data) + token * 192 + part * 64,
                               static_cast<float*>(gradients[part]->data) + token * 64, 64 * sizeof(float)));
    }
  }
}

TEST(RightInput, OutputBetweenTheRowsOfAnInput) {
  Call c;
  const auto both = c.input({2, 4, 8, 40});
  fill_random(both, 4), fill_random(c.k, 5), fill_random(c.v, 6);
  c.forward();  // of zeros; the next call must give something else
  c.q = TensorView(both.data, ElementType::float32, {2, 4, 8, 16}, {1280, 320, 40, 1});
  c.forward();
  const auto apart = c.outputs.out;
  c.outputs.out =
      TensorView(static_cast<float*>(both.data) + 16, ElementType::float32, {2, 4, 8, 24}, {1280, 320, 40, 1});
  c.forward();
  for (int row = 0; row < 64; ++row) {
    EXPECT_EQ(0, std::memcmp(static_cast<float*>(both.data) + row * 40 + 16, static_cast<float*>(apart.data) + row * 24,
                             24 * sizeof(float)));
  }
}

TEST(RightInput, OutputsWhoseRowsReachIntoOneAnother) {
  Call c;
  fill_random(c.q, 1), fill_random(c.k, 2), fill_random(c.v, 3);
  c.forward();
  const auto expected = c.outputs.out;
  const auto memory = c.output({2 * 4 * 400});
  // Every other column of a wide tensor, rows 45 apart: the even columns of one row, the odd ones of the next. And four
  // heads side by side, every fourth column each.
  const std::int64_t strides[][4] = {{1600, 400, 45, 2}, {800, 1, 96, 4}, {800, 1, 99, 4}, {-1600, 400, -45, 2}};
  for (const auto& s : strides) {
    auto* first = static_cast<float*>(memory.data) + (s[0] < 0 ? -s[0] - s[2] * 7 : 0);
    c.outputs.out = TensorView(first, ElementType::float32, {2, 4, 8, 24}, {s[0], s[1], s[2], s[3]});
    c.forward();
    for (int i = 0; i < 2 * 4 * 8 * 24; ++i) {
      const auto at = i / 768 * s[0] + i / 192 % 4 * s[1] + i / 24 % 8 * s[2] + i % 24 * s[3];
      ASSERT_EQ(first[at], static_cast<float*>(expected.data)[i]) << s[2] << " " << i;
    }
  }
}

TEST(RightInput, StridesOfAxesWithOneEntryMeanNothing) {
  Call c;
  c.q = c.input({1, 1, 8, 16}), c.k = c.input({1, 1, 12, 16}), c.v = c.input({1, 1, 12, 24});
  fill_random(c.q, 1), fill_random(c.k, 2), fill_random(c.v, 3);
  c.outputs = {c.output({1, 1, 8, 24}), {}, {}, {}};
  c.forward();
  const auto expected = c.outputs.out;
  c.outputs.out = c.output({1, 1, 8, 24});
  for (auto* view : {&c.q, &c.k, &c.v, &c.outputs.out}) {
    view->strides[0] = std::numeric_limits<std::int64_t>::max(),
    view->strides[1] = std::numeric_limits<std::int64_t>::min();
  }
  c.forward();
  EXPECT_EQ(0, std::memcmp(c.outputs.out.data, expected.data, 8 * 24 * sizeof(float)));
}

TEST(RightInput, NegativeStridesReadBackwards) {
  Call c;
  fill_random(c.q, 1), fill_random(c.k, 2), fill_random(c.v, 3);
  c.options.rule = causal();
  c.forward();
  const auto expected = c.outputs.out;
  Call flipped;
  flipped.options = c.options;
  const auto flip = [&](const TensorView& view) {
    const auto rows = view.shape[0] * view.shape[1] * view.shape[2], width = view.shape[3];
    auto copy = flipped.input({view.shape[0], view.shape[1], view.shape[2], width});
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy(static_cast<float*>(copy.data) + (rows - 1 - r) * width, static_cast<float*>(view.data) + r * width,
                  width * 4);
    }
    copy.data = static_cast<float*>(copy.data) + (rows - 1) * width;
    for (int i = 0; i < 3; ++i) copy.strides[i] = -copy.strides[i];
    return copy;
  };
  flipped.q = flip(c.q), flipped.k = flip(c.k), flipped.v = flip(c.v);
  flipped.forward();
  EXPECT_EQ(0, std::memcmp(flipped.outputs.out.data, expected.data, 2 * 4 * 8 * 24 * sizeof(float)));
}

TEST(RightInput, ShapesOfResults) {
  Call c;
  EXPECT_EQ(result_shapes(c.q, c.k, c.v).out, (std::vector<std::int64_t>{2, 4, 8, 24}));
  EXPECT_EQ(result_shapes(c.q, c.k, c.v).lse, (std::vector<std::int64_t>{2, 4, 8}));
  c.q.data = c.k.data = c.v.data = nullptr;  // shapes are all that is asked for
  EXPECT_NO_THROW(c.ask_for_shapes());
  c.use_layout_thd();
  EXPECT_EQ(result_shapes(c.q, c.k, c.v, c.options).out, (std::vector<std::int64_t>{8, 4, 24}));
  EXPECT_EQ(result_shapes(c.q, c.k, c.v, c.options).lse, (std::vector<std::int64_t>{4, 8}));
  c.options = {};
  c.use_layout_qkv();
  EXPECT_EQ(result_shapes(c.q, c.k, c.v, c.options).out, (std::vector<std::int64_t>{4, 8, 16}));
  EXPECT_EQ(result_shapes(c.q, c.k, c.v, c.options).lse, (std::vector<std::int64_t>{4, 8}));
}

TEST(RightInput, ManyThreadsAreJustAWish) {
  Call c;
  fill_random(c.q, 1), fill_random(c.k, 2), fill_random(c.v, 3);
  c.forward();
  const auto expected = c.outputs.out;
  c.outputs.out = c.output({2, 4, 8, 24});
  c.options.threads = 65536;
  c.forward();
  EXPECT_EQ(0, std::memcmp(c.outputs.out.data, expected.data, 2 * 4 * 8 * 24 * sizeof(float)));
}

}  // namespace
}  // namespace anyflash::wrong_input
