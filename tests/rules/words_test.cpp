// Words against the definition: sees() against the rule's tree, word() and word_of_queries() against sees().
#include "rules/words.h"

#include <gtest/gtest.h>

#include "cases.h"
#include "definition.h"
#include "rules/sees.h"

namespace anyflash::rules::testing {
namespace {

struct Checked {
  Rule rule;
  Shapes shapes;
  Program program;

  Checked(const Rule& r, const Shapes& s, Tables& tables) : rule(r), shapes(s), program(compile(r, s, 0, 0, tables)) {}
};

/// Extents of the cells that suit a sequence: rows always, squares and cubes where there is a plane or a volume.
std::vector<Int3> cell_extents(int dimensions) {
  std::vector<Int3> extents{{{1, 1, 64}}};
  if (dimensions >= 2) extents.push_back({{1, 8, 8}});
  if (dimensions == 3) extents.push_back({{4, 4, 4}});
  return extents;
}

template <class Sees>
std::uint64_t expected_word(const Box& cell, Int3 size, const Sees& sees_entry) {
  std::uint64_t word = 0;
  for (int e = 0; e < 64; ++e) {
    const auto c = cell.entry(e);
    if (inside(c, size) && sees_entry(c)) word |= std::uint64_t{1} << e;
  }
  return word;
}

void check_key_word(const Checked& c, Int3 query, const Box& cell) {
  const auto expected = expected_word(cell, c.shapes.k_size, [&](Int3 key) { return sees(c.program, query, key); });
  ASSERT_EQ(word(c.program, query, cell), expected)
      << name_of(c.rule, c.shapes) << " query " << flat_index(query, c.shapes.q_size) << " cell at " << cell.origin[0]
      << " " << cell.origin[1] << " " << cell.origin[2] << " step " << cell.step[0] << " " << cell.step[1] << " "
      << cell.step[2];
}

void check_query_word(const Checked& c, Int3 key, const Box& cell) {
  const auto expected = expected_word(cell, c.shapes.q_size, [&](Int3 query) { return sees(c.program, query, key); });
  ASSERT_EQ(word_of_queries(c.program, key, cell), expected)
      << name_of(c.rule, c.shapes) << " key " << flat_index(key, c.shapes.k_size) << " cell at " << cell.origin[0]
      << " " << cell.origin[1] << " " << cell.origin[2] << " step " << cell.step[0] << " " << cell.step[1] << " "
      << cell.step[2];
}

/// Every entry with every cell of both sides' grids.
void check_all_words(const Checked& c, Int3 step) {
  for (const auto& extent : cell_extents(c.shapes.dimensions)) {
    const Grid keys{c.shapes.k_size, extent, step}, queries{c.shapes.q_size, extent, step};
    for (std::int64_t q = 0; q < volume(c.shapes.q_size); ++q) {
      for (std::int32_t b = 0; b < keys.count(); ++b) {
        check_key_word(c, coordinate_of(q, c.shapes.q_size), keys.box(b));
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
    for (std::int64_t k = 0; k < volume(c.shapes.k_size); ++k) {
      for (std::int32_t b = 0; b < queries.count(); ++b) {
        check_query_word(c, coordinate_of(k, c.shapes.k_size), queries.box(b));
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

Int3 step_for(int dimensions, Maker& make) {
  Int3 step{{1, 1, 1}};
  for (int i = 3 - dimensions; i < 3; ++i) step[i] = make.chance(50) ? 1 : std::int32_t(make.between(1, 6));
  return step;
}

Int3 sizes(int dimensions, Int3 size) {
  for (int i = 0; i < 3 - dimensions; ++i) size[i] = 1;
  return size;
}

TEST(Words, EveryRuleEveryAlignmentSmallShapes) {
  const std::pair<Int3, Int3> shapes_1d[] = {{{{1, 1, 150}}, {{1, 1, 150}}}, {{{1, 1, 40}}, {{1, 1, 131}}},
                                             {{{1, 1, 97}}, {{1, 1, 13}}},   {{{1, 1, 1}}, {{1, 1, 70}}},
                                             {{{1, 1, 70}}, {{1, 1, 1}}},    {{{1, 1, 0}}, {{1, 1, 5}}},
                                             {{{1, 1, 5}}, {{1, 1, 0}}}};
  const std::pair<Int3, Int3> shapes_2d[] = {{{{1, 11, 13}}, {{1, 11, 13}}},
                                             {{{1, 5, 17}}, {{1, 10, 4}}},
                                             {{{1, 1, 9}}, {{1, 12, 1}}},
                                             {{{1, 3, 0}}, {{1, 3, 4}}}};
  const std::pair<Int3, Int3> shapes_3d[] = {
      {{{5, 6, 7}}, {{5, 6, 7}}}, {{{2, 9, 3}}, {{4, 3, 5}}}, {{{1, 5, 6}}, {{3, 1, 6}}}, {{{2, 3, 4}}, {{2, 0, 4}}}};
  for (int dimensions = 1; dimensions <= 3; ++dimensions) {
    const auto list = dimensions == 1   ? std::vector(std::begin(shapes_1d), std::end(shapes_1d))
                      : dimensions == 2 ? std::vector(std::begin(shapes_2d), std::end(shapes_2d))
                                        : std::vector(std::begin(shapes_3d), std::end(shapes_3d));
    Maker make(unsigned(100 + dimensions));
    for (const auto& [q, k] : list) {
      for (const auto align : alignments) {
        Shapes shapes;
        shapes.dimensions = dimensions;
        shapes.q_size = sizes(dimensions, q);
        shapes.k_size = sizes(dimensions, k);
        shapes.align = align;
        for (int kind = 0; kind < Maker::kinds; ++kind) {
          for (int negated = 0; negated < 2; ++negated) {
            Tables tables;
            auto rule =
                make.leaf(kind, shapes, make.chance(50) ? make.documents_rule(shapes) : make.packed_rule(shapes));
            if (negated) rule = ~rule;
            check_all_words({rule, shapes, tables}, {{1, 1, 1}});
            if (kind % 2 == negated) check_all_words({rule, shapes, tables}, step_for(dimensions, make));
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST(Words, RandomTreesSmallShapes) {
  Maker make(1);
  for (int n = repeats(3000); n > 0; --n) {
    const auto dimensions = int(make.between(1, 3));
    const auto shapes = make.shapes(dimensions, dimensions == 1 ? 200 : dimensions == 2 ? 14 : 6);
    const auto step = step_for(dimensions, make);
    Tables tables;
    check_all_words({make.any(shapes), shapes, tables}, step);
    if (HasFatalFailure()) return;
  }
}

TEST(Words, RandomEntriesLargeShapes) {
  const Int3 large[] = {{{1, 1, 1000000}}, {{1, 1000, 700}}, {{60, 100, 110}}};
  Maker make(2);
  for (int n = repeats(450); n > 0; --n) {
    const auto dimensions = int(make.between(1, 3));
    Shapes shapes;
    shapes.dimensions = dimensions;
    shapes.q_size = shapes.k_size = large[dimensions - 1];
    shapes.align = alignments[make.between(0, 3)];
    if (make.chance(50)) {
      auto& one = make.chance(50) ? shapes.q_size : shapes.k_size;
      for (int i = 3 - dimensions; i < 3; ++i) one[i] = std::int32_t(make.between(1, one[i]));
    }
    Tables tables;
    // No dense table at these sizes; documents (up to a million ids) now and then.
    const Checked checked{make.any(shapes, make.chance(4) ? Maker::without_tables + 2 : Maker::without_tables), shapes,
                          tables};
    const auto& extents = cell_extents(dimensions);
    const auto extent = extents[make.between(0, std::int64_t(extents.size()) - 1)];
    const auto step = step_for(dimensions, make);
    const Grid keys{shapes.k_size, extent, step}, queries{shapes.q_size, extent, step};
    for (int m = 0; m < 400; ++m) {
      auto query = coordinate_of(make.between(0, volume(shapes.q_size) - 1), shapes.q_size);
      auto key = coordinate_of(make.between(0, volume(shapes.k_size) - 1), shapes.k_size);
      auto key_cell = keys.box(std::int32_t(make.between(0, keys.count() - 1)));
      auto query_cell = queries.box(std::int32_t(make.between(0, queries.count() - 1)));
      if (m % 2) {  // near one another, where most rules change
        for (int i = 0; i < 3; ++i) {
          const auto near = [&](std::int32_t c, std::int32_t from, std::int32_t to) {
            const auto there = std::int64_t(c) * to / from + make.between(-40, 40);
            return std::int32_t(std::clamp<std::int64_t>(there, 0, to - 1));
          };
          key_cell.origin[i] = near(query[i], shapes.q_size[i], shapes.k_size[i]);
          query_cell.origin[i] = near(key[i], shapes.k_size[i], shapes.q_size[i]);
        }
      }
      check_key_word(checked, query, key_cell);
      check_query_word(checked, key, query_cell);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Words, SeesIsTheRulesTree) {
  Maker make(3);
  for (int n = repeats(15000); n > 0; --n) {
    const auto dimensions = int(make.between(1, 3));
    const auto shapes = make.shapes(dimensions, dimensions == 1 ? 60 : dimensions == 2 ? 8 : 4);
    Tables tables;
    const Checked c{make.any(shapes), shapes, tables};
    const Definition definition(c.rule, shapes);
    for (std::int64_t q = 0; q < volume(shapes.q_size); ++q) {
      for (std::int64_t k = 0; k < volume(shapes.k_size); ++k) {
        const auto query = coordinate_of(q, shapes.q_size), key = coordinate_of(k, shapes.k_size);
        ASSERT_EQ(sees(c.program, query, key), definition(query, key))
            << name_of(c.rule, shapes) << " query " << q << " key " << k;
      }
    }
  }
}

}  // namespace
}  // namespace anyflash::rules::testing
