// Tile classes: never wrong, and exact where it is easy to be.
#include "rules/classes.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "cases.h"
#include "rules/sees.h"

namespace anyflash::rules::testing {
namespace {

constexpr auto skip = TileClass::skip, partial = TileClass::partial, full_tile = TileClass::full;

/// A box anywhere, of any extent and step, that may reach beyond the sequence.
Box random_box(Maker& make, Int3 size, int dimensions) {
  Box box{{{0, 0, 0}}, {{1, 1, 1}}, {{1, 1, 1}}};
  for (int i = 3 - dimensions; i < 3; ++i) {
    box.origin[i] = std::int32_t(make.between(0, size[i] + (make.chance(5) ? 3 : -1)));
    box.extent[i] = std::int32_t(make.between(1, make.chance(50) ? 8 : size[i] + 4));
    box.step[i] = std::int32_t(make.chance(60) ? 1 : make.between(1, 8));
  }
  return box;
}

/// What the pairs say. Skip where there are none.
TileClass true_class(const Program& program, const Box& queries, const Box& keys) {
  bool any = false, all = true;
  for (std::int32_t q = 0; q < volume(queries.extent); ++q) {
    for (std::int32_t k = 0; k < volume(keys.extent); ++k) {
      const auto query = queries.entry(q), key = keys.entry(k);
      if (!inside(query, program.q_size()) || !inside(key, program.k_size())) continue;
      const bool visible = sees(program, query, key);
      any |= visible;
      all &= visible;
      if (any && !all) return partial;
    }
  }
  return any ? full_tile : skip;
}

struct Tally {
  std::int64_t decided = 0, undecided = 0;  // of the tiles that are not partial in truth
};

Tally compare(const Rule& rule, const Shapes& shapes, Maker& make, int boxes) {
  Tables tables;
  const auto program = compile(rule, shapes, 0, 0, tables);
  Tally tally;
  for (int n = 0; n < boxes; ++n) {
    const auto queries = random_box(make, shapes.q_size, shapes.dimensions);
    const auto keys = random_box(make, shapes.k_size, shapes.dimensions);
    const auto answer = tile_class(program, queries, keys), truth = true_class(program, queries, keys);
    if (answer != partial) {
      EXPECT_EQ(answer, truth) << name_of(rule, shapes);
    }
    if (truth != partial) ++(answer == truth ? tally.decided : tally.undecided);
    if (::testing::Test::HasFailure()) break;
  }
  return tally;
}

Shapes one_dimension(std::int32_t queries, std::int32_t keys, Align align = Align::none_front) {
  Shapes shapes;
  shapes.q_size = {{1, 1, queries}};
  shapes.k_size = {{1, 1, keys}};
  shapes.align = align;
  return shapes;
}

Box run_of(std::int32_t origin, std::int32_t extent, std::int32_t step = 1) {
  return {{{0, 0, origin}}, {{1, 1, extent}}, {{1, 1, step}}};
}

TEST(Classes, NeverWrongOnRandomRules) {
  Maker make(11);
  Tally all;
  for (int n = repeats(30000); n > 0; --n) {
    const auto dimensions = int(make.between(1, 3));
    const auto shapes = make.shapes(dimensions, dimensions == 1 ? 120 : dimensions == 2 ? 14 : 6);
    const auto tally = compare(make.any(shapes), shapes, make, 12);
    all.decided += tally.decided;
    all.undecided += tally.undecided;
    if (HasFailure()) return;
  }
  EXPECT_GT(all.decided, 4 * all.undecided);
}

// Single parts, by kind: how many of the tiles that are empty or full in truth are known to be. Plain boxes (step 1),
// since a box with steps may miss an interval that its hull meets.
TEST(Classes, ExactForSingleParts) {
  Maker make(12);
  for (int kind = 0; kind < Maker::kinds; ++kind) {
    const bool exact = kind != 8 && kind != 9;  // dilation and stride: the interval and the class are asked apart
    for (int n = repeats(1000); n > 0; --n) {
      const auto dimensions = int(make.between(1, 3));
      auto shapes = make.shapes(dimensions, dimensions == 1 ? 100 : dimensions == 2 ? 12 : 6);
      shapes.align = make.chance(50) ? Align::none_front : Align::none_end;
      if (dimensions > 1 && kind == Maker::without_tables) continue;  // documents
      auto rule = make.leaf(kind, shapes, make.packed_rule(shapes));
      if (kind == 2) rule = local(make.between(1, 9));
      Tables tables;
      const auto program = compile(rule, shapes, 0, 0, tables);
      for (int m = 0; m < 20; ++m) {
        auto queries = random_box(make, shapes.q_size, dimensions), keys = random_box(make, shapes.k_size, dimensions);
        queries.step = keys.step = {{1, 1, 1}};
        const auto answer = tile_class(program, queries, keys), truth = true_class(program, queries, keys);
        if (answer == partial && !exact) continue;
        ASSERT_EQ(answer, truth) << name_of(rule, shapes);
      }
    }
  }
}

TEST(Classes, CausalDiagonal) {
  Tables tables;
  for (const auto align : alignments) {
    const auto program = compile(causal(), one_dimension(1 << 20, 1 << 20, align), 0, 0, tables);
    EXPECT_EQ(tile_class(program, run_of(640, 64), run_of(640, 64)), partial);
    EXPECT_EQ(tile_class(program, run_of(640, 64), run_of(576, 64)), full_tile);
    EXPECT_EQ(tile_class(program, run_of(640, 64), run_of(704, 64)), skip);
    EXPECT_EQ(tile_class(program, run_of(640, 64), run_of(0, 641)), full_tile);
    EXPECT_EQ(tile_class(program, run_of(640, 64), run_of(704, 1 << 20)), skip);
    EXPECT_EQ(tile_class(program, run_of(640, 64), run_of(1 << 20, 64)), skip);  // beyond the sequence
  }
}

TEST(Classes, StepsThatMatchTheStride) {
  Tables tables;
  const auto program = compile(local(64, 2), one_dimension(4096, 4096), 0, 0, tables);
  EXPECT_EQ(tile_class(program, run_of(1024, 32, 4), run_of(1024, 32, 4)), full_tile);
  EXPECT_EQ(tile_class(program, run_of(1024, 32, 4), run_of(1025, 32, 4)), skip);
  EXPECT_EQ(tile_class(program, run_of(1024, 32, 4), run_of(1024, 64, 2)), partial);
  EXPECT_EQ(tile_class(program, run_of(1024, 32, 4), run_of(1025, 64, 2)), skip);
  EXPECT_EQ(tile_class(program, run_of(1024, 32, 4), run_of(1024 + 96 * 4, 64, 4)), skip);
  EXPECT_EQ(tile_class(program, run_of(1024, 32), run_of(1024, 32)), partial);
  const auto dilated = compile(neighbourhood(9, 6), one_dimension(4096, 4096), 0, 0, tables);
  EXPECT_EQ(tile_class(dilated, run_of(600, 5, 6), run_of(600, 5, 6)), full_tile);
  EXPECT_EQ(tile_class(dilated, run_of(600, 5, 6), run_of(601, 5, 6)), skip);
}

TEST(Classes, FarAwayIsSkipped) {
  Tables tables;
  Shapes shapes;
  shapes.dimensions = 2;
  shapes.q_size = shapes.k_size = {{1, 512, 512}};
  const Box queries{{{0, 64, 64}}, {{1, 8, 8}}, {{1, 1, 1}}};
  const Box near{{{0, 64, 72}}, {{1, 8, 8}}, {{1, 1, 1}}}, far{{{0, 64, 80}}, {{1, 8, 400}}, {{1, 1, 1}}};
  for (const auto& rule : {local(8), window(7, 7), neighbourhood(15), tiles(8, 3)}) {
    const auto program = compile(rule, shapes, 0, 0, tables);
    EXPECT_NE(tile_class(program, queries, near), skip) << rule.text();
    EXPECT_EQ(tile_class(program, queries, far), skip) << rule.text();
    EXPECT_EQ(tile_class(compile(~rule, shapes, 0, 0, tables), queries, far), full_tile) << rule.text();
  }
  EXPECT_EQ(tile_class(compile(tiles(8, 3), shapes, 0, 0, tables), queries, near), full_tile);
}

// Many short documents: boxes of documents apart are skipped however large they are, those inside one document are
// full.
TEST(Classes, DocumentsApartAreSkipped) {
  constexpr std::int32_t length = 20, count = 50000, entries = length * count;
  for (int style = 0; style < 4; ++style) {
    std::vector<std::int64_t> ids(entries);
    std::vector<std::int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    if (style == 2) std::shuffle(order.begin(), order.end(), std::mt19937(5));  // any ids, in one order on both sides
    for (std::int32_t i = 0; i < entries; ++i) ids[i] = style == 1 ? -(i / length) : order[i / length];
    if (style == 3) std::rotate(ids.begin(), ids.begin() + entries / 2, ids.end());  // not ascending: 25000 .. 0 ..
    const TensorView view(ids.data(), ElementType::int64, {entries});
    Tables tables;
    for (const auto& rule : {documents(view, view), causal() & documents(view, view)}) {
      const auto program = compile(rule, one_dimension(entries, entries), 0, 0, tables);
      EXPECT_EQ(tile_class(program, run_of(length * 100, 640), run_of(length * 132, entries)), skip) << style;
      EXPECT_EQ(tile_class(program, run_of(length * 100, 640), run_of(0, length * 100)), skip) << style;
      EXPECT_EQ(tile_class(program, run_of(length * 100, 640), run_of(0, length * 101)), partial) << style;
      EXPECT_EQ(tile_class(program, run_of(0, length * 25000), run_of(length * 25000, length * 25000)), skip) << style;
      EXPECT_EQ(tile_class(program, run_of(length * 7 + 10, 10), run_of(length * 7, 10)), full_tile) << style;
      EXPECT_EQ(tile_class(program, run_of(length * 7, length), run_of(length * 8, length)), skip) << style;
    }
  }
}

TEST(Classes, TablesAreReadForTiles) {
  std::vector<std::uint8_t> mask(512 * 512, 0);
  for (int q = 0; q < 512; ++q) {
    for (int k = 0; k < 512; ++k) mask[q * 512 + k] = k / 64 < q / 64;
  }
  const TensorView view(mask.data(), ElementType::uint8, {512, 512});
  Tables tables;
  for (const auto& rule : {dense(view), dense(view) | dense(view)}) {
    const auto program = compile(rule, one_dimension(512, 512), 0, 0, tables);
    EXPECT_EQ(tile_class(program, run_of(128, 128), run_of(0, 128)), full_tile);
    EXPECT_EQ(tile_class(program, run_of(128, 64), run_of(128, 64)), skip);
    EXPECT_EQ(tile_class(program, run_of(128, 128), run_of(128, 64)), partial);
  }
  std::uint8_t bits[] = {1, 0, 0, 1};
  const auto map = compile(blocks(TensorView(bits, ElementType::boolean, {2, 2}), 4096, 4096),
                           one_dimension(8192, 8192), 0, 0, tables);
  EXPECT_EQ(tile_class(map, run_of(0, 4096), run_of(0, 4096)), full_tile);
  EXPECT_EQ(tile_class(map, run_of(0, 4096), run_of(4096, 4096)), skip);
  EXPECT_EQ(tile_class(map, run_of(0, 4097), run_of(4096, 4096)), partial);
}

}  // namespace
}  // namespace anyflash::rules::testing
