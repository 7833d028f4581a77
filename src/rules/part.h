// The part of a rule between pieces of longer sequences: places and positions of its entries in the whole.
#pragma once

#include <vector>

#include "rules/compile.h"
#include "rules/node.h"

namespace anyflash::rules {

/// The outermost of the three dimensions that a sequence has.
inline int outermost(int dimensions) { return 3 - dimensions; }

/// A sequence's size as three numbers.
Int3 three(const SequenceShape& shape);

std::int64_t count_of(const Pieces& pieces);

/// The entries of the pieces that come before entry n.
std::int64_t count_before(const Pieces& pieces, std::int64_t n);

/// The shapes of the whole that a part belongs to; local: those of the call.
Shapes whole_shapes(const Whole& whole, const Shapes& local);

/// Pieces of flat entries, cut to the first `count` entries of the pieces.
Pieces flat_pieces(const Pieces& pieces, const SequenceShape& shape, std::int64_t count);

/// Throws Error if a part's pieces are not right, or do not fit the shapes of its call.
void check_part(const Node& node, const Shapes& local);

/// Whether the rule is a part that was made with key_lengths, so that its call needs some too.
bool part_has_lengths(const Rule& rule);

/// The largest divisor of `block` for which every block of the pieces' entries, in the order of the pieces, lies within
/// one block of the whole.
std::int64_t common_block(std::int64_t block, const Pieces& pieces);

/// The whole's block of each block of the pieces, both of common_block's size within blocks of `block` entries.
std::vector<std::int64_t> blocks_of_pieces(std::int64_t block, std::int64_t common, const Pieces& pieces);

}  // namespace anyflash::rules
