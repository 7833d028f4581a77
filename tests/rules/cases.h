// Rules, shapes and tables to try, by name and at random.
#pragma once

#include <algorithm>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "../random.h"
#include "rules/compile.h"

namespace anyflash::rules::testing {

inline constexpr Align alignments[] = {Align::none_front, Align::none_end, Align::scale_front, Align::scale_end};

using anyflash::testing::repeats;

/// Random numbers, and the memory of the tables that rules made here point to.
class Maker {
 public:
  explicit Maker(unsigned seed) : random_(anyflash::testing::seed_of(seed)) {}

  std::int64_t between(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  bool chance(int percent) { return between(1, 100) <= percent; }

  /// A size, its kind chosen with it: often equal, 0, 1, or a multiple of the other side's.
  Shapes shapes(int dimensions, std::int64_t largest) {
    Shapes shapes;
    shapes.dimensions = dimensions;
    shapes.q_size = shapes.k_size = {{1, 1, 1}};
    shapes.align = alignments[between(0, 3)];
    for (int i = 3 - dimensions; i < 3; ++i) {
      const auto size = std::int32_t(between(1, largest));
      shapes.q_size[i] = size;
      switch (between(0, 5)) {
        case 0: shapes.k_size[i] = size; break;
        case 1: shapes.k_size[i] = std::int32_t(std::max<std::int64_t>(1, size / between(1, 5))); break;
        case 2: shapes.k_size[i] = std::int32_t(between(1, 3)); break;
        default: shapes.k_size[i] = std::int32_t(between(1, largest)); break;
      }
      if (chance(50)) std::swap(shapes.q_size[i], shapes.k_size[i]);
    }
    return shapes;
  }

  /// Document ids of both sides, from neat to hopeless: rising, falling, recurring runs; then entry by entry a few ids,
  /// ids in turn, every id once.
  Rule documents_rule(const Shapes& shapes) {
    const auto queries = volume(shapes.q_size), keys = volume(shapes.k_size);
    const auto style = between(0, 6), period = between(1, 70);
    const auto most = std::max<std::int64_t>(1, std::max(queries, keys) / between(1, 40));
    const auto ids = [&](std::int64_t n) {
      auto& list = integers_.emplace_back();
      if (style >= 5) {
        for (std::int64_t i = 0; i < n; ++i) list.push_back(style == 5 ? i % period : i);
        if (style == 6) std::shuffle(list.begin(), list.end(), random_);
      }
      std::int64_t id = style == 2 ? 9 : -3;
      for (std::int64_t left = 0; std::int64_t(list.size()) < n; --left) {
        if (left <= 0) {
          left = between(1, most);
          id = style <= 1 ? id + between(0, 2) : style == 2 ? id - 1 : between(0, style == 3 ? 3 : 40);
        }
        list.push_back(style == 4 ? between(0, 2) : id);
      }
      return TensorView(list.data(), ElementType::int64, {n});
    };
    const auto ids_q = ids(queries);
    return documents(ids_q, queries == keys && chance(50) ? ids_q : ids(keys));
  }

  Rule packed_rule(const Shapes& shapes) {
    const auto count = between(1, 9);
    const auto lengths = [&](std::int64_t n) {
      auto& list = narrow_integers_.emplace_back();
      for (std::int64_t d = 0; d <= count; ++d)
        list.push_back(std::int32_t(d == 0 ? 0 : d == count ? n : between(0, n)));
      std::sort(list.begin(), list.end());
      return TensorView(list.data(), ElementType::int32, {count + 1});
    };
    const auto queries = lengths(volume(shapes.q_size));
    return documents_packed(queries, lengths(volume(shapes.k_size)));
  }

  TensorView bytes(std::int64_t rows, std::int64_t columns) {
    auto& list = bytes_.emplace_back(rows * columns * 2 + 1);
    const auto percent = int(between(0, 4) * 25);
    for (auto& byte : list) byte = chance(percent) ? std::uint8_t(between(1, 255)) : 0;
    switch (between(0, 3)) {
      case 0: return TensorView(list.data(), ElementType::uint8, {rows, columns}, {1, rows});  // transposed
      case 1: return TensorView(list.data(), ElementType::uint8, {rows, columns}, {2 * columns, 2});
      case 2:
        if (rows * columns > 0) {  // upside down
          return TensorView(list.data() + (rows - 1) * columns, ElementType::uint8, {rows, columns}, {-columns, 1});
        }
        [[fallthrough]];
      default: return TensorView(list.data(), ElementType::boolean, {rows, columns});
    }
  }

  Rule blocks_rule(const Shapes& shapes) {
    const auto block_q = between(1, 70) + volume(shapes.q_size) / 1000,
               block_k = between(1, 70) + volume(shapes.k_size) / 1000;
    const auto count = [](std::int64_t n, std::int64_t block) { return (n + block - 1) / block; };
    return blocks(bytes(count(volume(shapes.q_size), block_q), count(volume(shapes.k_size), block_k)), block_q,
                  block_k);
  }

  Rule dense_rule(const Shapes& shapes) { return dense(bytes(volume(shapes.q_size), volume(shapes.k_size))); }

  PerDimension numbers(int dimensions, std::int64_t low, std::int64_t high) {
    PerDimension result = between(low, high);
    if (chance(50)) return result;
    result.count = dimensions;
    for (int i = 0; i < dimensions; ++i) result.value[i] = between(low, high);
    return result;
  }

  PerDimension odd(PerDimension numbers) {
    for (auto& n : numbers.value) n |= 1;
    return numbers;
  }

  static constexpr int kinds = 14, without_tables = kinds - 3;

  /// Kind 0 .. kinds - 1; the last three have tables of an entry for each query and key.
  Rule leaf(int kind, const Shapes& shapes, Rule documents) {
    const auto d = shapes.dimensions;
    std::int64_t side = 1;
    for (int i = 0; i < 3; ++i) side = std::max<std::int64_t>({side, shapes.q_size[i], shapes.k_size[i]});
    const auto reach = chance(50) ? side : std::min<std::int64_t>(side, 12);
    const auto entries = std::max(volume(shapes.q_size), volume(shapes.k_size));
    switch (kind) {
      case 0: return full();
      case 1: return causal();
      case 2: return local(between(1, reach + 2), int(between(0, 4)), chance(40));
      case 3: return window(numbers(d, -1, reach), numbers(d, -1, reach));
      case 4: return prefix(chance(50) ? between(0, entries + 2) : between(0, 9));
      case 5: return sink(chance(50) ? between(0, entries + 2) : between(0, 9));
      case 6: return tiles(numbers(d, 1, reach), odd(numbers(d, 1, 7)));
      case 7: return neighbourhood(numbers(d, 1, reach + 1));
      case 8: return neighbourhood(numbers(d, 1, 9), numbers(d, 1, 7), numbers(d, 0, 1));
      case 9: return local(between(1, 9), int(between(1, 6)));
      case 10: return prefix_queries(chance(50) ? between(0, entries + 2) : between(0, 9));
      case 11: return documents;
      case 12: return blocks_rule(shapes);
      default: return dense_rule(shapes);
    }
  }

  /// A random tree. All its documents parts are one table.
  Rule tree(int depth, const Shapes& shapes, int leaf_kinds, const Rule& documents) {
    if (depth == 0 || chance(20)) return leaf(int(between(0, leaf_kinds - 1)), shapes, documents);
    switch (between(0, 4)) {
      case 0: return ~tree(depth - 1, shapes, leaf_kinds, documents);
      case 1:
      case 2: {
        const auto a = tree(depth - 1, shapes, leaf_kinds, documents);
        return a & tree(depth - 1, shapes, leaf_kinds, documents);
      }
      default: {
        const auto a = tree(depth - 1, shapes, leaf_kinds, documents);
        return a | tree(depth - 1, shapes, leaf_kinds, documents);
      }
    }
  }

  /// Any number of rules at once for a shape: each kind of leaf, some with documents beside, some trees.
  Rule any(const Shapes& shapes, int leaf_kinds = kinds) {
    const auto documents = leaf_kinds <= without_tables ? full()
                           : chance(50)                 ? documents_rule(shapes)
                                                        : packed_rule(shapes);
    const auto one = leaf(int(between(0, leaf_kinds - 1)), shapes, documents);
    switch (between(0, 3)) {
      case 0: return one;
      case 1: return one & documents;
      default: return tree(4, shapes, leaf_kinds, documents);
    }
  }

 private:
  std::mt19937_64 random_;
  std::deque<std::vector<std::int64_t>> integers_;
  std::deque<std::vector<std::int32_t>> narrow_integers_;
  std::deque<std::vector<std::uint8_t>> bytes_;
};

inline std::string name_of(const Rule& rule, const Shapes& s) {
  std::string text =
      rule.text() + " align " + std::to_string(int(s.align)) + " of " + std::to_string(s.dimensions) + ": q";
  for (int i = 0; i < 3; ++i) text += " " + std::to_string(s.q_size[i]);
  text += " k";
  for (int i = 0; i < 3; ++i) text += " " + std::to_string(s.k_size[i]);
  return text;
}

}  // namespace anyflash::rules::testing
