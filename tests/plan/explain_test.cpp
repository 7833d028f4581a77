// explain, pattern and picture, against each other and against figures worked out by hand.
#include <anyflash/explain.h>

#include <gtest/gtest.h>

#include <numeric>

#include "helpers.h"

namespace anyflash {
namespace {

std::int64_t ones(const std::vector<std::uint8_t>& seen) {
  return std::accumulate(seen.begin(), seen.end(), std::int64_t{0});
}

struct Shapes {
  SequenceShape q, k;
};

TEST(Explain, CountsVisiblePairs) {
  const std::vector<Shapes> shapes = {
      {{200}, {300}}, {{17, 20}, {17, 20}}, {{9, 30}, {18, 10}}, {{5, 6, 7}, {5, 6, 7}}};
  const std::vector<Rule> rules = {full(),
                                   causal(),
                                   local(5),
                                   local(4, 1, true),
                                   window(3, -1),
                                   prefix(70) | causal(),
                                   ~local(3),
                                   neighbourhood(5, 2),
                                   sink(9) | local(2),
                                   tiles(4, 3),
                                   full() & ~full()};
  for (const auto& shape : shapes) {
    for (const auto& rule : rules) {
      for (const auto align : {Align::none_front, Align::none_end, Align::scale_front, Align::scale_end}) {
        for (const bool backward : {false, true}) {
          ExplainOptions options;
          options.align = align;
          options.backward = backward;
          const auto figures = explain(rule, shape.q, shape.k, options);
          ASSERT_EQ(figures.visible_pairs, ones(pattern(rule, shape.q, shape.k, align))) << rule.text();
          EXPECT_EQ(figures.tiles_skipped + figures.tiles_partial + figures.tiles_full,
                    figures.query_blocks * figures.key_blocks);
          EXPECT_GE(figures.visited_pairs, figures.visible_pairs);
          ASSERT_EQ(std::int64_t(figures.tile_classes.size()), figures.query_blocks * figures.key_blocks);
          EXPECT_EQ(std::count(figures.tile_classes.begin(), figures.tile_classes.end(), 1), figures.tiles_partial);
          EXPECT_EQ(std::count(figures.tile_classes.begin(), figures.tile_classes.end(), 2), figures.tiles_full);
        }
      }
    }
  }
}

TEST(VisiblePairs, OfAllHeadsAndBatchEntries) {
  TensorView q(nullptr, ElementType::float32, {2, 4, 100, 8}), k(nullptr, ElementType::float32, {2, 2, 150, 8});
  Options options;
  EXPECT_EQ(visible_pairs(q, k, k, options), 2 * 4 * 100 * 150);
  options.rule = causal();
  options.align = Align::none_end;
  EXPECT_EQ(visible_pairs(q, k, k, options), 2 * 4 * ones(pattern(causal(), {100}, {150}, Align::none_end)));
  std::int64_t lengths[] = {60, 0};
  options.align = Align::none_front;
  options.key_lengths = TensorView(lengths, ElementType::int64, {2});
  EXPECT_EQ(visible_pairs(q, k, k, options), 4 * (60 * 61 / 2 + 40 * 60));
  options.key_lengths = {};
  std::vector<std::uint8_t> mask(4 * 100 * 150);
  std::fill_n(mask.begin() + 3 * 100 * 150, 7, std::uint8_t{1});  // of the last head
  options.rule = dense(TensorView(mask.data(), ElementType::boolean, {1, 4, 100, 150}));
  EXPECT_EQ(visible_pairs(q, k, k, options), 2 * 7);
  EXPECT_EQ(visible_pairs(TensorView(nullptr, ElementType::float32, {0, 4, 100, 8}),
                          TensorView(nullptr, ElementType::float32, {0, 2, 150, 8}),
                          TensorView(nullptr, ElementType::float32, {0, 2, 150, 8})),
            0);
}

/// Key lengths that end within tiles, of rules that depend on differences alone.
TEST(VisiblePairs, OfKeyLengths) {
  const TensorView q(nullptr, ElementType::float32, {3, 1, 400, 8}), k(nullptr, ElementType::float32, {3, 1, 500, 8});
  Options options;
  for (const auto& rule : {local(9, 1), causal(), window(300, 40), causal() & local(100)})
    for (const std::int64_t length : {500, 437, 300, 129, 120, 1, 0}) {
      std::int64_t lengths[] = {500, length, 0};
      options.rule = rule, options.key_lengths = TensorView(lengths, ElementType::int64, {3});
      const auto pairs = [&](std::int64_t keys) { return keys ? ones(pattern(rule, {400}, {keys})) : 0; };
      EXPECT_EQ(visible_pairs(q, k, k, options), pairs(500) + pairs(length)) << rule.text() << ", " << length;
    }
}

TEST(VisiblePairs, OfPackedSequences) {
  const TensorView x(nullptr, ElementType::float32, {10, 3, 8});
  std::int32_t ends[] = {0, 4, 4, 10};
  Options options;
  options.layout = Layout::thd;
  options.rule = causal();
  options.cu_seqlens_q = options.cu_seqlens_k = TensorView(ends, ElementType::int32, {4});
  EXPECT_EQ(visible_pairs(x, x, x, options), 3 * (4 * 5 / 2 + 6 * 7 / 2));
}

TEST(Explain, CountsTilesOfOneDifferenceOnce) {
  auto random = planning::RandomRules::of_differences(8, 2);
  for (int i = 0; i < anyflash::testing::repeats(60); ++i) {
    const auto c = random.next(i % 3);
    ExplainOptions options;
    options.align = c.align;
    options.backward = c.direction == Direction::backward;
    const auto used = 3 - c.dimensions;
    const SequenceShape q(c.q_size.v + used, c.q_size.v + 3), k(c.k_size.v + used, c.k_size.v + 3);
    ASSERT_EQ(explain(c.rule, q, k, options).visible_pairs, ones(pattern(c.rule, q, k, c.align)))
        << c.rule.text() << ", case " << i;
  }
}

TEST(Explain, DocumentsThatRestartCoordinatesAlone) {
  std::vector<std::int32_t> ids(2000);
  for (int i = 0; i < 2000; ++i) ids[i] = i / 300;
  const TensorView view(ids.data(), ElementType::int32, {2000});
  const auto rule = local(20) & (full() | documents(view, view));
  EXPECT_EQ(explain(rule, {2000}, {2000}).visible_pairs, ones(pattern(rule, {2000}, {2000})));
}

TEST(Explain, FiguresOfCausal) {
  ExplainOptions options;
  options.d_qk = 64;
  options.d_v = 128;
  options.type = ElementType::float16;
  const auto figures = explain(causal(), {16384}, {16384}, options);
  EXPECT_EQ(figures.visible_pairs, std::int64_t{16384} * 16385 / 2);
  EXPECT_LE(figures.visited_per_visible, 1.1);
  EXPECT_EQ(figures.forward_flops, 2.0 * (64 + 128) * double(figures.visible_pairs));
  EXPECT_EQ(figures.backward_flops, (6.0 * 64 + 4.0 * 128) * double(figures.visible_pairs));
  EXPECT_EQ(figures.bytes, 2.0 * 16384 * 2 * (64 + 128) + 4.0 * 16384);
  EXPECT_EQ(figures.dense_mask_bytes, 16384.0 * 16384);
}

TEST(Explain, LocalImages) {
  const auto band = [](double n, double window) { return n * n - (n - window) * (n - window + 1); };
  const auto eight = explain(local(8), {512, 512}, {512, 512}), sixteen = explain(local(16), {512, 512}, {512, 512});
  EXPECT_EQ(double(eight.visible_pairs), band(512, 8) * band(512, 8));
  EXPECT_EQ(double(sixteen.visible_pairs), band(512, 16) * band(512, 16));
  EXPECT_LE(eight.visited_per_visible, 4);
  EXPECT_LE(sixteen.visited_per_visible, 2.6);
}

TEST(Explain, TablesOfTheFirstEntry) {
  std::vector<std::uint8_t> mask(2 * 3 * 50 * 60);
  for (int i = 0; i < 50 * 60; ++i) mask[i] = i % 3 == 0;
  const auto rule = dense(TensorView(mask.data(), ElementType::boolean, {2, 3, 50, 60}));
  EXPECT_EQ(explain(rule, {50}, {60}).visible_pairs, 1000);
  EXPECT_EQ(ones(pattern(rule, {50}, {60})), 1000);
}

TEST(Explain, NothingThere) {
  const auto figures = explain(causal(), {0}, {10});
  EXPECT_EQ(figures.visible_pairs, 0);
  EXPECT_EQ(figures.visited_per_visible, 0);
  EXPECT_TRUE(pattern(causal(), {10}, {0}).empty());
  EXPECT_EQ(picture(causal(), {0}, {0}).grey.size(), 0u);
  EXPECT_TRUE(picture_text(picture(causal(), {0}, {0})).empty());
}

TEST(Explain, WrongShapesByName) {
  const auto line = [](const SequenceShape& q, const SequenceShape& k) -> std::string {
    try {
      explain(causal(), q, k);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(line({-8}, {8}), "q_shape: (-8), expected sizes from 0 to 2147483647");
  EXPECT_EQ(line({8}, {1, 2, 3, 4}), "k_shape: (1, 2, 3, 4), expected 1 to 3 sizes");
  EXPECT_EQ(line({}, {8}), "q_shape: (), expected 1 to 3 sizes");
  EXPECT_EQ(line({8}, {8, 8}), "k_shape: (8, 8), expected 1 sizes as in q_shape");
  EXPECT_EQ(line({8, 8}, {1 << 16, 1 << 15}),
            "k_shape: (65536, 32768), expected a sequence of at most 2147483647 entries");
}

TEST(Explain, WrongInput) {
  EXPECT_THROW(explain(causal(), {}, {10}), Error);
  EXPECT_THROW(explain(causal(), {10}, {1, 2, 3, 4}), Error);
  EXPECT_THROW(explain(causal(), {10}, {10, 10}), Error);
  EXPECT_THROW(explain(causal(), {-1}, {10}), Error);
  EXPECT_THROW(explain(causal(), {std::int64_t{1} << 62}, {10}), Error);
  EXPECT_THROW(pattern(causal(), {1 << 15}, {1 << 15}), Error);
  EXPECT_THROW(picture(causal(), {10}, {10}, Align::none_front, 0), Error);
  const auto line_of = [](std::int64_t d_qk, std::int64_t d_v) -> std::string {
    ExplainOptions options;
    options.d_qk = d_qk, options.d_v = d_v;
    try {
      explain(causal(), {10}, {10}, options);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(line_of(-1, 64), "d_qk: head size -1, expected 1 to 256");
  EXPECT_EQ(line_of(256, 513), "d_v: head size 513, expected 1 to 512");
  EXPECT_EQ(line_of(256, 512), "");
  EXPECT_THROW(picture(causal(), {10}, {10}, Align::none_front, 1 << 20), Error);
}

TEST(Picture, IsThePatternWhereItFits) {
  for (const auto& shape : {Shapes{{40}, {70}}, Shapes{{6, 9}, {5, 11}}, Shapes{{3, 4, 5}, {3, 4, 5}}}) {
    for (const auto& rule : {causal(), local(3), local(3, 1) | prefix(4), ~causal()}) {
      const auto seen = pattern(rule, shape.q, shape.k);
      const auto drawn = picture(rule, shape.q, shape.k);
      ASSERT_EQ(drawn.grey.size(), seen.size());
      for (std::size_t i = 0; i < seen.size(); ++i) ASSERT_EQ(drawn.grey[i], seen[i] ? 255 : 0) << rule.text();
    }
  }
}

TEST(Picture, ShrinksByTheVisiblePart) {
  const auto rule = local(20) & ~local(3, 2);
  const auto seen = pattern(rule, {30, 20}, {30, 20});
  const auto drawn = picture(rule, {30, 20}, {30, 20}, Align::none_front, 64);
  ASSERT_EQ(drawn.width, 64);
  double densest = 0;
  for (int y = 0; y < 64; ++y) {
    for (int x = 0; x < 64; ++x) {
      int visible = 0, pairs = 0;
      for (int i = y * 600 / 64; i < (y + 1) * 600 / 64; ++i) {
        for (int j = x * 600 / 64; j < (x + 1) * 600 / 64; ++j) visible += seen[i * 600 + j], ++pairs;
      }
      const int grey = drawn.grey[y * 64 + x];
      const double share = double(visible) / pairs;
      densest = std::max(densest, share);
      EXPECT_NEAR(grey, 255 * share / drawn.densest, 1.0);
      EXPECT_EQ(grey == 0, visible == 0);
      EXPECT_EQ(grey == 255, share == drawn.densest);
    }
  }
  EXPECT_EQ(densest, drawn.densest);
}

TEST(Picture, FindsAThinBandInALongSequence) {
  const auto drawn = picture(local(4), {1 << 20}, {1 << 20});
  ASSERT_EQ(drawn.width, 256);
  for (int i = 0; i < 256; ++i) {
    EXPECT_GT(drawn.grey[i * 256 + i], 127);
    EXPECT_EQ(drawn.grey[i * 256 + (i + 128) % 256], 0);
  }
}

TEST(Picture, AsText) {
  const Picture drawn{4, 3, {255, 0, 255, 0, 0, 0, 255, 255, 255, 255, 128, 0}, 3, 4};
  EXPECT_EQ(picture_text(drawn), "▀ █▄\n▀▀▀ \n");
}

/// Pixels of a colour.
int count_of(const Image& image, int red, int green, int blue) {
  int count = 0;
  for (std::size_t i = 0; i < image.rgb.size(); i += 3) {
    count += image.rgb[i] == red && image.rgb[i + 1] == green && image.rgb[i + 2] == blue;
  }
  return count;
}

TEST(Picture, AsAnImage) {
  const Picture drawn{4, 2, {255, 0, 1, 254, 255, 0, 1, 254}, 20, 40};
  const auto image = picture_image(drawn, "a title");
  ASSERT_EQ(image.rgb.size(), std::size_t(image.width) * image.height * 3);
  EXPECT_GE(count_of(image, 0x1f, 0x4e, 0x9b), 2 * 128 * 128);  // all visible
  EXPECT_GE(count_of(image, 0xa9, 0xc6, 0xec), 2 * 128 * 128);  // the least share, far from the grey of none
  EXPECT_GE(count_of(image, 0x4a, 0x7f, 0xc9), 2 * 128 * 128);
  EXPECT_GE(count_of(image, 0xf2, 0xf2, 0xf2), 2 * 128 * 128);
  EXPECT_GT(count_of(image, 0x30, 0x30, 0x30), 1000);  // the text
}

TEST(Picture, OfOneQueryAndOfNothingHasAxesAndALegend) {
  const auto one = picture_svg(picture(causal(), {1}, {3000}), "one");
  EXPECT_NE(one.find(">1 query<"), std::string::npos);
  EXPECT_NE(one.find(">3000 keys<"), std::string::npos);
  EXPECT_NE(one.find(">2000<"), std::string::npos) << "a tick";
  EXPECT_NE(one.find(">no pair visible<"), std::string::npos);
  EXPECT_EQ(count_of(picture_image(picture(full(), {1}, {512}), ""), 0x1f, 0x4e, 0x9b), 512 * 16 + 48 * 14);
  const auto none = picture(causal(), {0}, {7});
  EXPECT_NE(picture_svg(none, "none").find("the pattern is empty"), std::string::npos);
  EXPECT_GT(picture_image(none, "none").width, 0);
}

TEST(Picture, LegendNamesTheDensestShare) {
  const auto drawn = picture(local(8), {512, 512}, {512, 512}, Align::none_front, 64);
  EXPECT_LT(drawn.densest, 0.03);
  EXPECT_EQ(*std::max_element(drawn.grey.begin(), drawn.grey.end()), 255);
  EXPECT_NE(picture_svg(drawn, "").find("some: at most 2."), std::string::npos);
}

TEST(Picture, LongTitlesAreWrapped) {
  const auto svg = picture_svg(picture(full(), {10}, {10}), std::string(100, 'a') + " " + std::string(60, 'b'));
  EXPECT_EQ(svg.find(std::string(100, 'a')), std::string::npos);
  EXPECT_NE(svg.find(">" + std::string(60, 'b') + "<"), std::string::npos);
}

TEST(Picture, OfAnotherSizeThanItSaysIsAnError) {
  const Picture empty{5, 5, {}, 5, 5}, negative{-1, -1, {7}, 1, 1};
  for (const auto& wrong : {empty, negative}) {
    EXPECT_THROW(picture_text(wrong), Error);
    EXPECT_THROW(picture_svg(wrong, ""), Error);
    EXPECT_THROW(picture_image(wrong, ""), Error);
  }
}

TEST(Picture, AsSvg) {
  const Picture drawn{3, 2, {255, 255, 0, 255, 255, 0}, 200, 300};
  const auto svg = picture_svg(drawn, "a < b & c");
  EXPECT_NE(svg.find("M0 0h2v2h-2z"), std::string::npos) << "equal pixels are one rectangle";
  EXPECT_NE(svg.find("a &lt; b &amp; c"), std::string::npos);
  EXPECT_NE(svg.find("300 keys"), std::string::npos);
  EXPECT_NE(svg.find("200 queries"), std::string::npos);
  EXPECT_EQ(svg.find("<svg"), 0u);
  EXPECT_EQ(svg.substr(svg.size() - 7), "</svg>\n");
}

}  // namespace
}  // namespace anyflash
