// A rule, compiled for one problem: a small flat program, plain data, passed by value to any backend.
//
// Three questions are asked of it, each answered from O(1) work an atom (words.h, classes.h):
//   word(program, query, key_cell)            64 bits, bit e: does the query see entry e of the cell?
//   word_of_queries(program, key, query_cell) 64 bits, bit e: does entry e of the cell see the key?
//   tile_class(program, queries, keys)        skip, full or partial; may be cautious (partial), never wrong
// sees(program, query, key) in sees.h is the definition, for tests and pictures alone.
//
// Cells hold 64 entries: 64 in a row (extent 1,1,64), 8 x 8 (1,8,8) or 4 x 4 x 4, with any step. Bits of entries outside the
// sequence are 0. Query and key arguments must lie inside.
#pragma once

#include <cstdint>

#include "rules/box.h"

namespace anyflash::rules {

enum class TileClass : std::uint8_t { skip, partial, full };

// (Program, its atoms and its frame are defined here by the rules' implementation.)

}  // namespace anyflash::rules
