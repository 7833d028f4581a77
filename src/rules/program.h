// A rule, compiled for one problem: a small flat program, plain data, passed by value to any backend.
//
// It answers three questions, each with O(1) work per atom (words.h, classes.h):
//   word(program, query, key_cell)            64 bits, bit e: does the query see entry e of the cell?
//   word_of_queries(program, key, query_cell) 64 bits, bit e: does entry e of the cell see the key?
//   tile_class(program, queries, keys)        skip, full or partial; may be conservative (partial), never wrong
// sees(program, query, key) in sees.h is the definition, pair by pair: slow. compile.h makes programs.
//
// Cells hold 64 entries: 64 in a row (extent 1,1,64), 8 x 8 (1,8,8) or 4 x 4 x 4, with any step. Bits of entries
// outside the sequence are 0. Query and key arguments must lie inside.
#pragma once

#include <cstdint>

#include "rules/box.h"

namespace anyflash::rules {

enum class TileClass : std::uint8_t { skip, partial, full };

inline constexpr int max_atoms = 32;  ///< most parts of a rule; check throws above it
inline constexpr int max_ops = 64;

/// The entries of one dimension, or of one document, in their common frame of r = max(q_size, k_size) coordinates:
/// query entry c is at c * q_step + q_offset, key entry c at c * k_step + k_offset.
struct Axis {
  std::int32_t q_size, k_size, r;
  std::int32_t q_step, q_offset, k_step, k_offset;

  ANYFLASH_HD std::int64_t query(std::int64_t c) const { return c * q_step + q_offset; }
  ANYFLASH_HD std::int64_t key(std::int64_t c) const { return c * k_step + k_offset; }
};

// clang-format off
enum class AtomKind : std::uint8_t {
  full, causal, local, window, prefix, prefix_queries, sink, documents, tiles, neighbourhood, blocks, dense
};
// clang-format on

/// One part of a rule. What a and b hold, per dimension:
///   local          a: largest |x - y|, b: stride (a power of two); causal: 1 if only order(x) >= order(y)
///   window         a: largest x - y, b: largest y - x
///   prefix, sink   a: the last visible key, an aligned (sink: raw) coordinate; without any it is a negated `full`
///   prefix_queries a: the last query that sees all keys, an aligned coordinate; else as prefix
///   tiles          a: entries of a tile, b: tiles of the kernel
///   neighbourhood  a: kernel, b: dilation, bit i of causal: causal in dimension i
///   blocks         a[2]: queries of a block, b[2]: keys of a block; data
///   dense          data
/// data points at the byte of query (block) 0 and key (block) 0; the next is stride_q or stride_k bytes further.
struct Atom {
  AtomKind kind;
  bool negated;
  std::uint8_t causal;
  Int3 a, b;
  const std::uint8_t* data;
  std::int64_t stride_q, stride_k;
};

/// A maximal run of neighbours of one document: entries start .. end - 1. The first one is entry number `base` of its
/// document.
struct Segment {
  std::int32_t start, end, document, base;
};

/// Least and largest document number of some segments.
struct DocumentRange {
  std::int32_t least, largest;
};

struct DocumentSide {
  const std::int32_t* segment_of;   ///< (entries): the segment of an entry
  const std::int32_t* document_of;  ///< (entries): its document; the same array if segment s is all of document s
  const Segment* segments;
  const DocumentRange* tree;  ///< node s of 1 .. 2 * segment_count - 1 covers nodes 2s and 2s + 1, leaves are the
                              ///< segments; null if document numbers never descend along the sequence
  std::int32_t segment_count;
};

struct Documents {
  DocumentSide q, k;
  const Axis* axes;  ///< (documents): the frame inside each, 1-dimensional sequences
};

struct Program {
  std::int32_t dimensions;  ///< of the sequence, 1 to 3: the last of the three
  std::int32_t atom_count, op_count;
  bool conjunction;  ///< every atom must hold, ops need not be run; also for no atoms: all is visible
  bool has_documents;
  bool documents_required;  ///< no pair of different documents is visible
  bool restarts;            ///< coordinates restart in each document
  bool rule_restarts;       ///< and a part of the rule uses coordinates
  bool pieces;              ///< entries of one document may lie apart in it: the sequences are pieces of longer ones
  Axis axis[3];
  Documents documents;
  const void* document_ids[2];  ///< of queries and keys, in GPU memory, where documents are found later; else null
  Atom atoms[max_atoms];
  std::uint8_t ops[max_ops];  ///< postfix: an atom's number or one of the two below; at most stack_depth values

  static constexpr std::uint8_t op_and = 64, op_or = 65;
  static constexpr int stack_depth = 6;  // the deeper operand goes first, so 2^5 atoms need 6

  ANYFLASH_HD Int3 q_size() const { return {{axis[0].q_size, axis[1].q_size, axis[2].q_size}}; }
  ANYFLASH_HD Int3 k_size() const { return {{axis[0].k_size, axis[1].k_size, axis[2].k_size}}; }
};

}  // namespace anyflash::rules
