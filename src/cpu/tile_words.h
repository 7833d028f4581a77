// Mask words of partial tiles. Where a rule depends only on coordinate differences, tiles with the same difference
// share words: a narrow rule needs few. Where it depends only on documents, neighbouring queries of one document share
// a word.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/facts.h"
#include "plan/plan.h"
#include "rules/classes.h"
#include "rules/words.h"

namespace anyflash::cpu {

template <int kMostRows>
class TileWords {
 public:
  /// The words of the first `rows` queries of a box (the same number in every call): bit j is key j of the key box;
  /// queries outside see nothing. Valid until the next call.
  const std::uint64_t* of(const rules::Program& program, const Box& queries, std::int32_t rows, const Box& keys) {
    if (&program != program_) {
      program_ = &program, known_ = next_ = 0;
      by_difference_ = planning::by_difference(program), by_document_ = planning::by_document(program);
    }
    if (!by_difference_ || !rules::whole(queries, program.q_size()) || !rules::whole(keys, program.k_size()))
      return find(program, queries, rows, keys, tiles_[kMostKnown]);
    Int3 difference;
    for (int i = 0; i < 3; ++i)
      difference[i] =
          static_cast<std::int32_t>(program.axis[i].query(queries.origin[i]) - program.axis[i].key(keys.origin[i]));
    for (int i = 0; i < known_; ++i)
      if (tiles_[i].difference == difference) return tiles_[i].words;
    Tile& tile = tiles_[next_];
    next_ = (next_ + 1) % kMostKnown;
    known_ = std::min(known_ + 1, kMostKnown);
    tile.difference = difference;
    return find(program, queries, rows, keys, tile);
  }

 private:
  struct Tile {
    Int3 difference;
    std::uint64_t words[kMostRows];
  };
  static constexpr int kMostKnown = 16;

  const std::uint64_t* find(const rules::Program& program, const Box& queries, std::int32_t rows, const Box& keys,
                            Tile& tile) const {
    rules::WordsOfKeys words(program, keys);
    std::int32_t document = -1;
    for (std::int32_t row = 0; row < rows; ++row) {
      const Int3 c = queries.entry(row);
      if (!rules::inside(c, program.q_size())) {
        tile.words[row] = 0, document = -1;
        continue;
      }
      const auto before = document;
      if (by_document_) document = program.documents.q.document_of[rules::flat_index(c, program.q_size())];
      tile.words[row] = document >= 0 && document == before ? tile.words[row - 1] : words(c);
    }
    return tile.words;
  }

  const rules::Program* program_ = nullptr;
  bool by_difference_ = false, by_document_ = false;
  int known_ = 0, next_ = 0;
  Tile tiles_[kMostKnown + 1];
};

}  // namespace anyflash::cpu
