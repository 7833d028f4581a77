// Compiling: tables with batch and head axes, key lengths, facts, and all that can be wrong with a rule on given
// shapes.
#include <gtest/gtest.h>

#include <limits>

#include "cases.h"
#include "definition.h"
#include "rules/classes.h"
#include "rules/sees.h"

namespace anyflash::rules::testing {
namespace {

Shapes one_dimension(std::int32_t queries, std::int32_t keys) {
  Shapes shapes;
  shapes.q_size = {{1, 1, queries}};
  shapes.k_size = {{1, 1, keys}};
  return shapes;
}

std::string check_error(const Rule& rule, const Shapes& shapes) {
  try {
    check(rule, shapes);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Error::Kind::value);
    return error.what();
  }
  return "";
}

/// sees, words of both kinds and the class of everything, against the rule's tree.
void check_program(const Rule& rule, const Shapes& shapes, std::int64_t batch, std::int64_t head, Tables& tables,
                   std::int64_t key_length = -1) {
  const auto program = compile(rule, shapes, batch, head, tables, key_length);
  const Definition definition(rule, shapes, batch, head, key_length);
  const auto queries = program.q_size(), keys = program.k_size();
  const Int3 row{{1, 1, 64}}, ones{{1, 1, 1}};
  bool any = false, all = true;
  for (std::int32_t q = 0; q < volume(queries); ++q) {
    for (std::int32_t k = 0; k < volume(keys); ++k) {
      const auto x = coordinate_of(q, queries), y = coordinate_of(k, keys);
      const bool expected = definition(x, y);
      any |= expected;
      all &= expected;
      ASSERT_EQ(sees(program, x, y), expected) << name_of(rule, shapes) << " " << q << " " << k;
      const auto seen = word(program, x, {{{y[0], y[1], y[2] / 64 * 64}}, row, ones});
      ASSERT_EQ(seen >> y[2] % 64 & 1, expected) << name_of(rule, shapes) << " " << q << " " << k;
      const auto seeing = word_of_queries(program, y, {{{x[0], x[1], x[2] / 64 * 64}}, row, ones});
      ASSERT_EQ(seeing >> x[2] % 64 & 1, expected) << name_of(rule, shapes) << " " << q << " " << k;
    }
  }
  if (shapes.dimensions == 1 && key_length >= 0) {  // keys that do not exist have no bit
    ASSERT_EQ(word(program, {{0, 0, 0}}, {{{0, 0, std::int32_t(key_length)}}, row, ones}), 0u);
  }
  const auto answer = tile_class(program, {{{0, 0, 0}}, queries, ones}, {{{0, 0, 0}}, shapes.k_size, ones});
  if (answer != TileClass::partial) {
    ASSERT_EQ(answer, class_of(!any, all));
  }
}

TEST(Compile, BatchAndHeadsOfTables) {
  Maker make(31);
  for (int n = repeats(300); n > 0; --n) {
    auto shapes = one_dimension(std::int32_t(make.between(1, 80)), std::int32_t(make.between(1, 80)));
    shapes.align = alignments[make.between(0, 3)];
    shapes.batch = make.between(1, 3);
    shapes.heads = make.between(1, 3);
    const auto b = make.chance(50) ? shapes.batch : 1, h = make.chance(50) ? shapes.heads : 1;
    const auto q = volume(shapes.q_size), k = volume(shapes.k_size);
    const auto rows = make.chance(20) ? 1 : q, columns = make.chance(20) ? 1 : k;
    const auto block_q = make.between(1, 70), block_k = make.between(1, 70);
    const auto down = (q + block_q - 1) / block_q, across = (k + block_k - 1) / block_k;
    std::vector<std::uint8_t> mask(b * h * rows * columns), map(b * h * down * across);
    std::vector<std::int32_t> ids_q(b * q), ids_k(b * k);
    for (auto& byte : mask) byte = make.chance(50) ? 255 : 0;
    for (auto& byte : map) byte = make.chance(50);
    for (auto& id : ids_q) id = std::int32_t(make.between(-1, 2));
    for (auto& id : ids_k) id = std::int32_t(make.between(-1, 2));
    const auto by_mask = dense(TensorView(mask.data(), ElementType::uint8, {b, h, rows, columns}));
    const auto by_map = blocks(TensorView(map.data(), ElementType::boolean, {b, h, down, across}), block_q, block_k);
    const auto by_document = documents(TensorView(ids_q.data(), ElementType::int32, {b, q}),
                                       TensorView(ids_k.data(), ElementType::int32, {b, k}));
    const Rule rules[] = {by_mask, by_map, by_document & causal(), by_mask & ~by_map,
                          by_document | (by_map & local(4))};
    const auto& rule = rules[make.between(0, 4)];
    Tables tables;
    const auto key_length = make.chance(50) ? make.between(0, k) : -1;
    for (std::int64_t batch = 0; batch < shapes.batch; ++batch) {
      for (std::int64_t head = 0; head < shapes.heads; ++head) {
        check_program(rule, shapes, batch, head, tables, key_length);
        if (HasFatalFailure()) return;
      }
    }
    EXPECT_LE(tables.documents.size(), std::size_t(b));  // heads share them
    const auto facts = rules::facts(rule, shapes);
    EXPECT_TRUE(facts.tables);
    EXPECT_EQ(facts.batch_varies, b > 1);
    if (&rule != &rules[2]) {
      EXPECT_EQ(facts.heads_vary, h > 1);
    }
  }
}

TEST(Compile, KeyLengths) {
  Maker make(32);
  for (int n = repeats(400); n > 0; --n) {
    const auto shapes = make.shapes(1, 90);
    Tables tables;
    check_program(make.any(shapes), shapes, 0, 0, tables, make.between(0, shapes.k_size[2]));
    if (HasFatalFailure()) return;
  }
}

TEST(Compile, CumulativeLengthsOfTheCall) {
  std::int32_t cu_q[] = {0, 3, 3, 10}, cu_k[] = {0, 7, 9, 16};
  auto shapes = one_dimension(10, 16);
  shapes.cu_seqlens_q = TensorView(cu_q, ElementType::int32, {4});
  shapes.cu_seqlens_k = TensorView(cu_k, ElementType::int32, {4});
  for (const auto align : alignments) {
    shapes.align = align;
    Tables tables;
    for (const auto& rule : {full(), causal(), local(2), causal() | sink(2)}) check_program(rule, shapes, 0, 0, tables);
    EXPECT_EQ(tables.documents.size(), 1u);
  }
  EXPECT_TRUE(facts(causal(), shapes).tables);
  EXPECT_EQ(facts(causal(), shapes).key, "");
}

TEST(Compile, Facts) {
  Shapes shapes = one_dimension(128, 128);
  EXPECT_EQ(facts(causal() & local(8, 2), shapes).key, "causal() & local(8, log2_stride=2)");
  EXPECT_FALSE(facts(causal(), shapes).tables);
  EXPECT_EQ(facts(causal() & local(8, 2), shapes).stride, (Int3{{1, 1, 4}}));
  EXPECT_EQ(facts(local(8, 2) & neighbourhood(3, 6), shapes).stride, (Int3{{1, 1, 12}}));
  EXPECT_EQ(facts(local(8, 2) | neighbourhood(3, 6), shapes).stride, (Int3{{1, 1, 2}}));
  EXPECT_EQ(facts(~local(8, 2), shapes).stride, (Int3{{1, 1, 1}}));
  EXPECT_EQ(facts(~(~local(8, 2) | causal()), shapes).stride, (Int3{{1, 1, 4}}));
  shapes.dimensions = 2;
  shapes.q_size = shapes.k_size = {{1, 16, 16}};
  EXPECT_EQ(facts(neighbourhood(3, {2, 5}), shapes).stride, (Int3{{1, 2, 5}}));
}

TEST(Compile, DocumentsRequired) {
  std::int64_t ids[6] = {1, 1, 2, 2, 3, 3};
  const TensorView view(ids, ElementType::int64, {6});
  const auto same = documents(view, view);
  Tables tables;
  const auto required = [&](const Rule& rule) {
    return compile(rule, one_dimension(6, 6), 0, 0, tables).documents_required;
  };
  EXPECT_TRUE(required(same));
  EXPECT_TRUE(required(causal() & same));
  EXPECT_TRUE(required((causal() & same) | (same & sink(1))));
  EXPECT_TRUE(required(~(~same | causal())));
  EXPECT_FALSE(required(same | sink(1)));
  EXPECT_FALSE(required(~same));
  EXPECT_FALSE(required(causal() & (same | sink(1))));
}

// 32 parts in any shape of tree run on a stack of 6.
TEST(Compile, ThirtyTwoParts) {
  const auto shapes = one_dimension(70, 70);
  const auto part = [](int i) { return i % 3 == 0 ? local(i + 1) : i % 3 == 1 ? ~window(i, 2) : sink(i); };
  Rule left = part(0), right = part(31), balanced[32];
  for (int i = 1; i < 32; ++i) left = i % 2 ? left | part(i) : left & part(i);
  for (int i = 30; i >= 0; --i) right = i % 2 ? part(i) | right : part(i) & right;
  for (int i = 0; i < 32; ++i) balanced[i] = part(i);
  for (int n = 32; n > 1; n /= 2) {
    for (int i = 0; i < n / 2; ++i)
      balanced[i] = n % 3 ? balanced[2 * i] | balanced[2 * i + 1] : balanced[2 * i] & balanced[2 * i + 1];
  }
  for (const auto& rule : {left, right, balanced[0], ~balanced[0]}) {
    Tables tables;
    check_program(rule, shapes, 0, 0, tables);
  }
  EXPECT_EQ(check_error(left & full(), shapes), "rule: 33 parts, at most 32");
}

// Numbers at the ends of 64 bits mean the same as any number beyond the sizes.
TEST(Compile, HugeNumbers) {
  constexpr auto most = std::numeric_limits<std::int64_t>::max(), least = std::numeric_limits<std::int64_t>::min();
  const std::pair<Rule, Rule> pairs[] = {{window(most, 3), window(-1, 3)},
                                         {window(3, least), window(3, -1)},
                                         {prefix(most), full()},
                                         {sink(most), full()},
                                         {tiles(most, 3), full()},
                                         {tiles(2, most), full()},
                                         {neighbourhood(most), full()},
                                         {neighbourhood(3, most), local(1)},
                                         {neighbourhood(most, most), local(1)},
                                         {neighbourhood(most, 1, 1), window(-1, 0)},
                                         {local(most, 30), local(1)},
                                         {local(most, 2), local(1000, 2)}};
  for (int dimensions = 1; dimensions <= 2; ++dimensions) {
    Shapes shapes = one_dimension(70, 90);
    shapes.dimensions = dimensions;
    if (dimensions == 2) shapes.q_size = {{1, 3, 20}}, shapes.k_size = {{1, 4, 15}};
    const Box all_queries{{{0, 0, 0}}, shapes.q_size, {{1, 1, 1}}}, all_keys{{{0, 0, 0}}, shapes.k_size, {{1, 1, 1}}};
    for (const auto align : alignments) {
      shapes.align = align;
      Tables tables;
      for (const auto& [huge, plain] : pairs) {
        const auto program = compile(huge, shapes, 0, 0, tables);
        const Definition definition(plain, shapes);
        EXPECT_EQ(tile_class(program, all_queries, all_keys),
                  tile_class(compile(plain, shapes, 0, 0, tables), all_queries, all_keys));
        for (std::int32_t q = 0; q < volume(shapes.q_size); ++q) {
          for (std::int32_t k = 0; k < volume(shapes.k_size); ++k) {
            const auto x = coordinate_of(q, shapes.q_size), y = coordinate_of(k, shapes.k_size);
            const Box cell{y, {{1, 1, 64}}, {{1, 1, 1}}}, queries{x, {{1, 1, 64}}, {{1, 1, 1}}};
            ASSERT_EQ(word(program, x, cell) & 1, definition(x, y)) << name_of(huge, shapes) << " " << q << " " << k;
            ASSERT_EQ(word_of_queries(program, y, queries) & 1, definition(x, y)) << name_of(huge, shapes);
          }
        }
      }
    }
  }
}

TEST(Check, Dimensions) {
  Shapes shapes = one_dimension(128, 128);
  EXPECT_EQ(check_error(window({1, 2}, 0), shapes), "rule window: 2 numbers, expected 1 as the sequence's dimensions");
  EXPECT_EQ(check_error(neighbourhood(3, {1, 2, 3}), shapes),
            "rule neighbourhood: 3 numbers, expected 1 as the sequence's dimensions");
  shapes.dimensions = 3;
  EXPECT_EQ(check_error(causal() & ~tiles({1, 2}, 3), shapes),
            "rule tiles: 2 numbers, expected 1 or 3 as the sequence's dimensions");
  EXPECT_EQ(check_error(tiles({1, 2, 3}, 3), shapes), "");
}

TEST(Check, TablesFitTheProblem) {
  std::vector<std::int64_t> ids(1000);
  std::vector<std::uint8_t> bytes(1000);
  auto shapes = one_dimension(16, 24);
  shapes.batch = 2;
  shapes.heads = 4;
  const auto integers = [&](auto... shape) { return TensorView(ids.data(), ElementType::int64, {shape...}); };
  const auto bits = [&](auto... shape) { return TensorView(bytes.data(), ElementType::uint8, {shape...}); };
  EXPECT_EQ(check_error(documents(integers(16), integers(24)), shapes), "");
  EXPECT_EQ(check_error(documents(integers(2, 16), integers(1, 24)), shapes), "");
  EXPECT_EQ(check_error(documents(integers(15), integers(24)), shapes),
            "rule documents: ids_q has 15 entries, expected 16 as the queries");
  EXPECT_EQ(check_error(documents(integers(16), integers(16)), shapes),
            "rule documents: ids_k has 16 entries, expected 24 as the keys");
  EXPECT_EQ(check_error(documents(integers(3, 16), integers(24)), shapes),
            "rule documents: ids_q has 3 batch entries, expected 2 (or 1) as in query");
  EXPECT_EQ(check_error(documents(integers(16), integers(24)) | documents(integers(2, 16), integers(24)), shapes),
            "rule: two tables of documents, at most one");
  EXPECT_EQ(check_error(documents(integers(16), integers(24)) | ~documents(integers(16), integers(24)), shapes), "");
  EXPECT_EQ(check_error(blocks(bits(2, 3), 8, 8), shapes), "");
  EXPECT_EQ(check_error(blocks(bits(2, 3), 5, 8), shapes),
            "rule blocks: bitmap has 2 rows, expected 4 for the queries");
  EXPECT_EQ(check_error(blocks(bits(2, 3), 8, 7), shapes),
            "rule blocks: bitmap has 3 columns, expected 4 for the keys");
  EXPECT_EQ(check_error(blocks(bits(3, 2, 3), 8, 8), shapes),
            "rule blocks: bitmap has 3 heads, expected 4 (or 1) as in query");
  EXPECT_EQ(check_error(blocks(bits(3, 4, 2, 3), 8, 8), shapes),
            "rule blocks: bitmap has 3 batch entries, expected 2 (or 1) as in query");
  EXPECT_EQ(check_error(dense(bits(16, 24)), shapes), "");
  EXPECT_EQ(check_error(dense(bits(1, 4, 1, 24)), shapes), "");
  EXPECT_EQ(check_error(dense(bits(24, 16)), shapes),
            "rule dense: mask has 24 rows, expected 16 (or 1) as the queries");
  EXPECT_EQ(check_error(dense(bits(16, 16)), shapes),
            "rule dense: mask has 16 columns, expected 24 (or 1) as the keys");
  EXPECT_EQ(check_error(dense(bits(1, 2, 16, 24)), shapes),
            "rule dense: mask has 2 heads, expected 4 (or 1) as in query");
}

TEST(Check, CumulativeLengths) {
  const auto shapes = one_dimension(10, 10);
  std::int32_t good[] = {0, 4, 4, 10}, late[] = {1, 4, 4, 10}, falls[] = {0, 5, 4, 10}, early[] = {0, 4, 4, 9};
  const auto with = [&](std::int32_t* q, std::int32_t* k) {
    return documents_packed(TensorView(q, ElementType::int32, {4}), TensorView(k, ElementType::int32, {4}));
  };
  EXPECT_EQ(check_error(with(good, good), shapes), "");
  EXPECT_EQ(check_error(with(late, good), shapes), "cu_seqlens_q: starts at 1, expected 0");
  EXPECT_EQ(check_error(with(good, falls), shapes), "cu_seqlens_k: falls from 5 to 4 at entry 2, expected no fall");
  EXPECT_EQ(check_error(with(early, good), shapes), "cu_seqlens_q: ends at 9, expected 10 as the queries");
  auto packed = shapes;
  packed.cu_seqlens_q = TensorView(good, ElementType::int32, {4});
  try {
    check(causal(), packed);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "cu_seqlens_k: not given");
  }
  packed.cu_seqlens_k = packed.cu_seqlens_q;
  EXPECT_EQ(check_error(with(good, good), packed), "");  // the same table twice
  EXPECT_EQ(check_error(with(good, early), packed), "rule: two tables of documents, at most one");
}

}  // namespace
}  // namespace anyflash::rules::testing
