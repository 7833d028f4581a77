// The part of a rule between pieces of longer sequences: its program against the whole's, entry by entry. And what a
// split asks of a rule, against the definition.
#include <anyflash/attention.h>
#include <anyflash/sharding.h>

#include <gtest/gtest.h>

#include <functional>

#include "cases.h"
#include "rules/classes.h"
#include "rules/part.h"
#include "rules/sees.h"

namespace anyflash::rules::testing {
namespace {

SequenceShape shape_of(Int3 size, int dimensions) { return {size.v + 3 - dimensions, size.v + 3}; }

/// Ascending pieces; one at most if `single`. Their ends are often multiples of 8.
Pieces random_pieces(Maker& make, std::int64_t size, bool single) {
  Pieces pieces;
  const auto most = single ? 1 : make.between(1, 9);
  const auto grain = make.chance(50) ? 8 : 1;
  for (std::int64_t at = 0; at < size && std::int64_t(pieces.size()) < most;) {
    const auto first = std::min(size - 1, (at + make.between(0, size / 3)) / grain * grain);
    if (first < at) break;
    const auto count =
        std::min(size - first, std::max<std::int64_t>(1, make.between(1, size / most + 1) / grain * grain));
    pieces.push_back({first, count});
    at = first + count;
  }
  return pieces;
}

std::vector<std::int64_t> entries_of(const Pieces& pieces) {
  std::vector<std::int64_t> entries;
  for (const auto& piece : pieces)
    for (std::int64_t i = 0; i < piece.count; ++i) entries.push_back(piece.first + i);
  return entries;
}

struct Case {
  Shapes whole, own;
  Program program, of_part;
  std::vector<std::int64_t> q, k;  // the whole's entry of each entry of the outermost dimension
  std::string name;
  Tables of_whole;
  Tables tables;

  Int3 in_whole(Int3 c, const std::vector<std::int64_t>& entries) const {
    const auto o = outermost(whole.dimensions);
    c[o] = std::int32_t(entries[c[o]]);
    return c;
  }
  bool seen(Int3 query, Int3 key) const { return sees(program, in_whole(query, q), in_whole(key, k)); }
};

Case make_case(Maker& make) {
  Case c;
  const auto d = int(make.between(1, 3));
  c.whole = make.shapes(d, d == 1 ? 260 : d == 2 ? 14 : 6);
  const auto rule = make.any(c.whole);
  const auto o = outermost(d);
  auto q = random_pieces(make, c.whole.q_size[o], d > 1), k = random_pieces(make, c.whole.k_size[o], d > 1);
  c.own = c.whole;
  c.own.q_size[o] = std::int32_t(count_of(q));
  c.own.k_size[o] = std::int32_t(count_of(k));
  std::int64_t length = -1, own_length = -1;
  TensorView lengths;
  if (d == 1 && make.chance(25)) {
    length = make.between(0, c.whole.k_size[2]);
    own_length = count_before(k, length);
    lengths = TensorView(&length, ElementType::int64, {1});
  }
  c.q = entries_of(q);
  c.k = entries_of(k);
  const auto own = part(rule, shape_of(c.whole.q_size, d), shape_of(c.whole.k_size, d), q, k, lengths);
  check(own, c.own);
  c.name = name_of(own, c.whole);
  c.program = compile(rule, c.whole, 0, 0, c.of_whole, length);
  c.of_part = compile(own, c.own, 0, 0, c.tables, own_length);
  if (own_length >= 0) c.own.k_size[2] = std::int32_t(own_length), c.k.resize(own_length);
  return c;
}

Int3 random_step(Maker& make, int dimensions) {
  Int3 step{{1, 1, 1}};
  for (int i = 3 - dimensions; i < 3 && make.chance(40); ++i) step[i] = std::int32_t(make.between(1, 6));
  return step;
}

template <class Sees>
std::uint64_t expected_word(const Box& cell, Int3 size, const Sees& seen) {
  std::uint64_t word = 0;
  for (int e = 0; e < 64; ++e)
    if (const auto c = cell.entry(e); inside(c, size) && seen(c)) word |= std::uint64_t{1} << e;
  return word;
}

void check_words(const Case& c, Int3 extent, Int3 step) {
  const Grid keys{c.own.k_size, extent, step}, queries{c.own.q_size, extent, step};
  for (std::int64_t q = 0; q < volume(c.own.q_size); ++q) {
    const auto query = coordinate_of(q, c.own.q_size);
    for (std::int32_t b = 0; b < keys.count(); ++b) {
      const auto cell = keys.box(b);
      if (!inside(cell.origin, c.own.k_size)) continue;
      ASSERT_EQ(word(c.of_part, query, cell),
                expected_word(cell, c.own.k_size, [&](Int3 key) { return c.seen(query, key); }))
          << c.name << " query " << q << " cell " << b;
    }
  }
  for (std::int64_t k = 0; k < volume(c.own.k_size); ++k) {
    const auto key = coordinate_of(k, c.own.k_size);
    for (std::int32_t b = 0; b < queries.count(); ++b) {
      const auto cell = queries.box(b);
      if (!inside(cell.origin, c.own.q_size)) continue;
      ASSERT_EQ(word_of_queries(c.of_part, key, cell),
                expected_word(cell, c.own.q_size, [&](Int3 query) { return c.seen(query, key); }))
          << c.name << " key " << k << " cell " << b;
    }
  }
}

Box random_box(Maker& make, Int3 size, int dimensions) {
  Box box{{{0, 0, 0}}, {{1, 1, 1}}, random_step(make, dimensions)};
  for (int i = 3 - dimensions; i < 3; ++i) {
    box.origin[i] = std::int32_t(make.between(0, size[i] - 1));
    box.extent[i] = std::int32_t(make.between(1, make.chance(50) ? size[i] : 4));
  }
  return box;
}

void check_class(const Case& c, Box queries, Box keys) {
  const auto answer = tile_class(c.of_part, queries, keys);
  if (answer == TileClass::partial) return;
  clip(queries, c.own.q_size);
  clip(keys, c.own.k_size);
  for (std::int32_t q = 0; q < volume(queries.extent); ++q)
    for (std::int32_t k = 0; k < volume(keys.extent); ++k)
      ASSERT_EQ(c.seen(queries.entry(q), keys.entry(k)), answer == TileClass::full) << c.name;
}

TEST(Part, EveryEntryAsInTheWhole) {
  Maker make(61);
  for (int n = repeats(1500); n > 0; --n) {
    const auto c = make_case(make);
    if (volume(c.own.q_size) == 0 || volume(c.own.k_size) == 0) continue;
    for (std::int64_t q = 0; q < volume(c.own.q_size); ++q)
      for (std::int64_t k = 0; k < volume(c.own.k_size); ++k) {
        const auto query = coordinate_of(q, c.own.q_size), key = coordinate_of(k, c.own.k_size);
        ASSERT_EQ(sees(c.of_part, query, key), c.seen(query, key)) << c.name << " " << q << " " << k;
      }
    const auto d = c.own.dimensions;
    check_words(c, d == 1 ? Int3{{1, 1, 64}} : d == 2 ? Int3{{1, 8, 8}} : Int3{{4, 4, 4}}, random_step(make, d));
    if (d > 1) check_words(c, {{1, 1, 64}}, {{1, 1, 1}});
    for (int i = 0; i < 40; ++i) check_class(c, random_box(make, c.own.q_size, d), random_box(make, c.own.k_size, d));
    if (HasFatalFailure()) return;
  }
}

// The class of one piece a side is as exact as the whole's: full and skipped tiles are found.
TEST(Part, ClassesOfLongSequences) {
  Tables tables;
  const auto own = part(causal(), {1 << 20}, {1 << 20}, {{1 << 18, 1 << 17}, {3 << 18, 1 << 17}}, {{0, 1 << 19}});
  Shapes shapes;
  shapes.q_size = {{1, 1, 1 << 18}};
  shapes.k_size = {{1, 1, 1 << 19}};
  check(own, shapes);
  const auto program = compile(own, shapes, 0, 0, tables);
  const auto answer = [&](std::int32_t q, std::int32_t k, std::int32_t count) {
    const Int3 ones{{1, 1, 1}};
    return tile_class(program, {{{0, 0, q}}, {{1, 1, count}}, ones}, {{{0, 0, k}}, {{1, 1, count}}, ones});
  };
  EXPECT_EQ(answer(0, 0, 1 << 17), TileClass::full);
  EXPECT_EQ(answer(0, 3 << 17, 1 << 17), TileClass::skip);
  EXPECT_EQ(answer(1 << 17, 3 << 17, 1 << 17), TileClass::full);
  EXPECT_EQ(answer(0, 1 << 18, 64), TileClass::partial);
  EXPECT_EQ(facts(own, shapes).key,
            "part(causal(), queries 262144-393216 786432-917504 of 1048576, keys 0-524288 of 1048576)");
}

std::vector<std::int64_t> random_cuts(Maker& make, std::int64_t size) {
  std::vector<std::int64_t> cuts{0};
  while (cuts.back() < size) cuts.push_back(std::min(size, cuts.back() + make.between(0, size / 2 + 1)));
  return cuts;
}

TEST(Sharding, SeenKeysAndCounts) {
  Maker make(62);
  for (int n = repeats(600); n > 0; --n) {
    const auto d = int(make.between(1, 3));
    const auto shapes = make.shapes(d, d == 1 ? 200 : d == 2 ? 14 : 6);
    const auto rule = make.any(shapes);
    const auto o = outermost(d);
    const auto q_shape = shape_of(shapes.q_size, d), k_shape = shape_of(shapes.k_size, d);
    Tables tables;
    const auto program = compile(rule, shapes, 0, 0, tables);
    const auto q_cuts = random_cuts(make, q_shape[0]), k_cuts = random_cuts(make, k_shape[0]);
    const auto pieces = random_pieces(make, q_shape[0], false);
    const auto unit = make.between(1, 20);
    const auto found = seen_keys(rule, q_shape, k_shape, shapes.align, {pieces}, unit)[0];
    const auto seen = entries_of(found), asked = entries_of(pieces);
    const auto blocks = seen_blocks(rule, q_shape, k_shape, shapes.align, q_cuts, k_cuts);
    const auto counts = visible_by_block(rule, q_shape, k_shape, shapes.align, q_cuts, 1 << 30);
    const auto block_of = [](const std::vector<std::int64_t>& cuts, std::int64_t at) {
      return std::upper_bound(cuts.begin(), cuts.end(), at) - cuts.begin() - 1;
    };
    std::vector<double> expected(counts.size());
    for (std::int64_t q = 0; q < volume(shapes.q_size); ++q)
      for (std::int64_t k = 0; k < volume(shapes.k_size); ++k) {
        const auto query = coordinate_of(q, shapes.q_size), key = coordinate_of(k, shapes.k_size);
        if (!sees(program, query, key)) continue;
        const auto i = block_of(q_cuts, query[o]), j = block_of(k_cuts, key[o]);
        ++expected[i];
        ASSERT_TRUE(blocks[i * std::int64_t(k_cuts.size() - 1) + j]) << name_of(rule, shapes);
        if (std::binary_search(asked.begin(), asked.end(), query[o])) {
          ASSERT_TRUE(std::binary_search(seen.begin(), seen.end(), key[o]))
              << name_of(rule, shapes) << " " << q << " " << k;
        }
      }
    ASSERT_EQ(counts, expected) << name_of(rule, shapes);
    for (const auto& piece : found) ASSERT_EQ(piece.first % unit, 0);
  }
}

/// With key_lengths, what the batch entries see of the keys that each has.
TEST(Sharding, KeyLengths) {
  Maker make(63);
  for (int n = repeats(300); n > 0; --n) {
    const auto shapes = make.shapes(1, 200);
    const auto rule = make.any(shapes);
    const SequenceShape q_shape{shapes.q_size[2]}, k_shape{shapes.k_size[2]};
    const auto q_cuts = random_cuts(make, q_shape[0]), k_cuts = random_cuts(make, k_shape[0]);
    std::vector<std::int64_t> lengths(make.between(1, 8));
    for (auto& length : lengths) length = make.between(0, k_shape[0]);
    const auto seen = entries_of(seen_keys(rule, q_shape, k_shape, shapes.align, {{{0, q_shape[0]}}}, 1, lengths)[0]);
    const auto blocks = seen_blocks(rule, q_shape, k_shape, shapes.align, q_cuts, k_cuts, lengths);
    const auto counts = visible_by_block(rule, q_shape, k_shape, shapes.align, q_cuts, 1 << 30, lengths);
    const auto block_of = [](const std::vector<std::int64_t>& cuts, std::int64_t at) {
      return std::upper_bound(cuts.begin(), cuts.end(), at) - cuts.begin() - 1;
    };
    std::vector<double> expected(counts.size());
    for (const auto length : lengths) {
      if (length == 0) continue;
      Tables tables;
      const auto program = compile(rule, shapes, 0, 0, tables, length);
      for (std::int32_t q = 0; q < q_shape[0]; ++q)
        for (std::int32_t k = 0; k < length; ++k) {
          if (!sees(program, {{0, 0, q}}, {{0, 0, k}})) continue;
          const auto i = block_of(q_cuts, q), j = block_of(k_cuts, k);
          expected[i] += 1.0 / double(lengths.size());
          ASSERT_TRUE(std::binary_search(seen.begin(), seen.end(), k)) << name_of(rule, shapes) << " " << length;
          ASSERT_TRUE(blocks[i * std::int64_t(k_cuts.size() - 1) + j]) << name_of(rule, shapes) << " " << length;
        }
    }
    if (lengths.size() > 4) continue;  // of more a few are counted
    for (std::size_t i = 0; i < counts.size(); ++i) ASSERT_NEAR(counts[i], expected[i], 1e-6) << name_of(rule, shapes);
  }
}

// Samples do not keep step with the rows of an image or with equal documents.
TEST(Sharding, SamplesAreSpread) {
  const auto counted = [](const Rule& rule, const SequenceShape& shape, std::int64_t blocks) {
    std::vector<std::int64_t> cuts;
    for (std::int64_t i = 0; i <= blocks; ++i) cuts.push_back(i * shape[0] / blocks);
    double sum = 0;
    for (const auto one : visible_by_block(rule, shape, shape, Align::none_front, cuts)) sum += one;
    return sum;
  };
  const double of_a_row = 63 * 256 - 31 * 32;  // keys that one axis lets 256 entries see
  EXPECT_NEAR(counted(local(32), {256, 256}, 64) / (of_a_row * of_a_row), 1, 0.05);
  std::vector<std::int32_t> ends;
  for (std::int32_t i = 0; i <= 128; ++i) ends.push_back(i * 1024);
  const TensorView lengths(ends.data(), ElementType::int32, {129});
  const auto documents = documents_packed(lengths, lengths) & causal();
  EXPECT_NEAR(counted(documents, {1 << 17}, 8) / (128.0 * 1024 * 1025 / 2), 1, 0.05);
}

// No more than is seen, where the rule is simple.
TEST(Sharding, SeenKeysAreFew) {
  const std::int64_t n = 1 << 16;
  const auto seen = [](const Rule& rule, const SequenceShape& shape, Piece queries, std::int64_t unit) {
    return seen_keys(rule, shape, shape, Align::none_front, {{queries}}, unit)[0];
  };
  EXPECT_EQ(seen(causal(), {n}, {n / 2, 1024}, 64), (Pieces{{0, n / 2 + 1024}}));
  EXPECT_EQ(seen(local(4096, 0, true), {n}, {n / 2, 4096}, 64), (Pieces{{n / 2 - 4096, 8192}}));
  EXPECT_EQ(seen(neighbourhood(5), {64, 64}, {32, 16}, 1), (Pieces{{30, 20}}));
  std::vector<std::int32_t> ends;
  for (std::int32_t i = 0; i <= 16; ++i) ends.push_back(i * 4096);
  const TensorView lengths(ends.data(), ElementType::int32, {17});
  EXPECT_EQ(seen(documents_packed(lengths, lengths) & causal(), {n}, {6144, 4096}, 64), (Pieces{{4096, 6144}}));
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Part, WrongInput) {
  const auto of = [](Pieces q, Pieces k, SequenceShape shape = {10}) {
    return error_of([&] { part(causal(), shape, shape, q, k); });
  };
  EXPECT_EQ(of({{0, 3}, {3, 7}}, {}), "");
  EXPECT_EQ(of({{0, 0}}, {}), "rule part: queries piece of 0 entries, expected at least 1");
  EXPECT_EQ(of({{0, 3}, {2, 2}}, {}), "rule part: queries piece from 2, expected from 3 on: ascending pieces");
  EXPECT_EQ(of({}, {{4, 7}}), "rule part: keys piece up to 11, expected at most 10");
  EXPECT_EQ(of({{-1, 7}}, {}), "rule part: queries piece from -1, expected from 0 on: ascending pieces");
  EXPECT_EQ(of({{0, 1}, {2, 1}}, {}, {10, 10}),
            "rule part: queries of 2 pieces, expected 1 in a sequence of 2 dimensions");
  EXPECT_EQ(of({}, {}, {}), "rule part: queries shape of 0 sizes, expected 1 to 3");
  EXPECT_EQ(of({}, {}, {1 << 20, 1 << 20}), "rule part: queries shape of more than 2^31 - 1 entries");
  const auto own = part(causal(), {10}, {10}, {{2, 3}}, {{0, 4}});
  EXPECT_EQ(error_of([&] { part(own, {10}, {10}, {}, {}); }),
            "rule part: of a part, expected a rule of whole sequences");
  EXPECT_EQ(error_of([&] { (void)(own & full()); }),
            "rule part: combined with another rule, expected the part of the whole rule");
  EXPECT_EQ(error_of([&] { (void)~own; }),
            "rule part: combined with another rule, expected the part of the whole rule");
  Shapes shapes;
  shapes.q_size = {{1, 1, 3}};
  shapes.k_size = {{1, 1, 5}};
  EXPECT_EQ(error_of([&] { check(own, shapes); }), "rule part: keys have 4 entries in a dimension, and the call 5");
  std::int64_t length = 3;
  const auto shorter = part(causal(), {10}, {10}, {{2, 3}}, {{0, 4}}, TensorView(&length, ElementType::int64, {1}));
  shapes.k_size = {{1, 1, 4}};
  Tables tables;
  EXPECT_EQ(error_of([&] { compile(shorter, shapes, 0, 0, tables, 4); }),
            "key_lengths: 4 of the call's keys, expected 3 as in the rule's part");
}

TEST(Part, CallWithoutItsKeyLengthsIsRefused) {
  std::int64_t whole = 3;
  std::int64_t own = 3;
  float numbers[4] = {}, out[4] = {7, 7, 7, 7};
  const auto view = [](float* data, std::int64_t n) { return TensorView(data, ElementType::float32, {1, 1, n, 1}); };
  Options options;
  options.rule = part(full(), {10}, {10}, {{2, 3}}, {{0, 4}}, TensorView(&whole, ElementType::int64, {1}));
  const auto call = [&] {
    ForwardOutputs outputs;
    outputs.out = view(out, 3);
    forward(view(numbers, 3), view(numbers, 4), view(numbers, 4), outputs, options);
  };
  EXPECT_EQ(error_of(call), "key_lengths: not given, expected those of the rule's part");
  EXPECT_EQ(out[0], 7);
  options.key_lengths = TensorView(&own, ElementType::int64, {1});
  call();
  EXPECT_EQ(out[0], 0);
}

}  // namespace
}  // namespace anyflash::rules::testing
