// Words and tile classes on a GPU, by the kernel of tests/rules/device.cu: against sees(), and the CPU's classes.
#include "../rules/device.cu"

#include <gtest/gtest.h>

#include "../rules/cases.h"
#include "rules/sees.h"

namespace anyflash::rules::testing {
namespace {

constexpr int entries = 64;

struct Answers {
  Word words[entries], words_of_queries[entries];
  TileClass tile;
};

/// A cell of 64 entries, somewhere in a sequence, in rows, squares or cubes.
Box cell_of(Int3 size, int dimensions, Maker& make) {
  Box cell{{{0, 0, 0}}, {{1, 1, entries}}, {{1, 1, 1}}};
  if (dimensions == 2 && make.chance(50)) cell.extent = {{1, 8, 8}};
  if (dimensions == 3 && make.chance(50)) cell.extent = {{4, 4, 4}};
  for (int i = 3 - dimensions; i < 3; ++i) {
    cell.origin[i] = static_cast<std::int32_t>(make.between(0, size[i] - 1));
    if (make.chance(30)) cell.step[i] = static_cast<std::int32_t>(make.between(2, 6));
  }
  return cell;
}

template <class Sees>
Word expected(Int3 entry, Int3 size, const Box& cell, Int3 other_size, const Sees& sees_entry) {
  Word word = 0;
  for (int e = 0; inside(entry, size) && e < entries; ++e) {
    const auto other = cell.entry(e);
    if (inside(other, other_size) && sees_entry(other)) word |= Word{1} << e;
  }
  return word;
}

TEST(WordsOnAGpu, AreWhatSeesSays) {
  Maker make(1);
  Answers* answers = nullptr;
  ASSERT_EQ(cudaMallocManaged(&answers, sizeof(Answers)), cudaSuccess);
  for (int turn = 0; turn < 2000; ++turn) {
    const int dimensions = 1 + turn % 3;
    const auto shapes = make.shapes(dimensions, dimensions == 1 ? 300 : dimensions == 2 ? 30 : 9);
    Tables tables;
    const auto rule = make.any(shapes, Maker::without_tables);
    const auto program = compile(rule, shapes, 0, 0, tables);
    const auto queries = cell_of(shapes.q_size, dimensions, make), keys = cell_of(shapes.k_size, dimensions, make);
    answer<<<1, entries>>>(program, queries, keys, answers->words, answers->words_of_queries, &answers->tile);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (int e = 0; e < entries; ++e) {
      const auto query = queries.entry(e), key = keys.entry(e);
      ASSERT_EQ(answers->words[e], expected(query, shapes.q_size, keys, shapes.k_size,
                                            [&](Int3 other) { return sees(program, query, other); }))
          << name_of(rule, shapes);
      ASSERT_EQ(answers->words_of_queries[e], expected(key, shapes.k_size, queries, shapes.q_size,
                                                       [&](Int3 other) { return sees(program, other, key); }))
          << name_of(rule, shapes);
    }
    ASSERT_EQ(answers->tile, tile_class(program, queries, keys)) << name_of(rule, shapes);
  }
  cudaFree(answers);
}

}  // namespace
}  // namespace anyflash::rules::testing
