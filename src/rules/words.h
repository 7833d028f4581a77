// Mask words: which of a cell's 64 entries does one entry of the other side see, or is it seen by?
//
// A per-dimension rule is an interval and a residue class in each dimension; the cell's word is the outer product of
// their bits. Order (causal, prefix, prefix_queries, sink) is a lexicographic comparison, made of per-dimension "less"
// and "equal" bits. Rules over places in memory walk the cell's rows. Where coordinates restart in each document, the
// rule is evaluated once for each document segment that the cell touches, in that document's frame. In a cell of many
// segments it is evaluated once for each document, whose entries count as contiguous wherever they are. `&`, `|`, `~`
// of rules are those of words.
#pragma once

#include "rules/bits.h"

namespace anyflash::rules {

/// Which side the cell is on.
enum class CellOf : std::uint8_t { keys, queries };

/// One evaluation: an entry, and a cell of the other side.
struct Question {
  std::int64_t place;    // flat index of the entry
  std::int64_t x[3];     // its aligned coordinates
  std::int64_t size[3];  // of the frame (the query's document's, where coordinates restart)
  Box cell;
  std::int64_t count[3];  // entries of the cell inside the sequence, along each dimension
  Line line[3];           // their aligned coordinates
  // Where coordinates restart:
  bool same_document;
  Word members = all_bits;  // `line` counts only these entries of the cell
};

/// The entries whose coordinate is, in row-major order, at or before the target (`upwards`: at or after it).
template <bool upwards>
ANYFLASH_HD Word order_bits(const Int3& extent, const Line* line, const std::int64_t* target, int dimensions) {
  const auto beyond = [&](int i, std::int64_t from) {  // strictly, or not, by `from`
    return upwards ? interval_bits(line[i], from, unlimited) : interval_bits(line[i], -unlimited, from);
  };
  Word word = spread(extent, 2, beyond(2, target[2]));
  ANYFLASH_UNROLL(1)
  for (int i = 1; i >= 3 - dimensions; --i) {
    const auto strictly = spread(extent, i, beyond(i, target[i] + (upwards ? 1 : -1)));
    const auto equal = spread(extent, i, interval_bits(line[i], target[i], target[i]));
    word = strictly | (equal & word);
  }
  return word;
}

/// a is at or before b in row-major order.
ANYFLASH_HD bool in_order(const std::int64_t* a, const std::int64_t* b, int dimensions) {
  ANYFLASH_UNROLL(1)
  for (int i = 3 - dimensions; i < 3; ++i) {
    if (a[i] != b[i]) return a[i] < b[i];
  }
  return true;
}

/// The word of a rule over places in memory: row_bits(flat index of the row's first entry, step, entries) for each row
/// of the cell.
template <class RowBits>
ANYFLASH_HD Word by_rows(const Question& question, const Int3& size, const RowBits& row_bits) {
  const auto& [origin, extent, step] = question.cell;
  Word word = 0;
  ANYFLASH_UNROLL(1)
  for (std::int32_t z = 0; z < question.count[0]; ++z) {
    ANYFLASH_UNROLL(1)
    for (std::int32_t y = 0; y < question.count[1]; ++y) {
      const auto first = flat_index({{origin[0] + z * step[0], origin[1] + y * step[1], origin[2]}}, size);
      word |= row_bits(first, step[2], question.count[2]) << ((z * extent[1] + y) * extent[2]);
    }
  }
  return word;
}

/// Bits of entries first + step * e: one read for each block of `block` neighbours that they touch.
ANYFLASH_HD Word block_bits(const std::uint8_t* data, std::int64_t stride, std::int64_t block, std::int64_t first,
                            std::int64_t step, std::int64_t count) {
  Word bits = 0;
  ANYFLASH_UNROLL(1)
  for (std::int64_t e = 0; e < count;) {
    const auto number = (first + e * step) / block;
    const auto end = smaller(count, ((number + 1) * block - first + step - 1) / step);
    if (data[number * stride]) bits |= bits_between(e, end - 1);
    e = end;
  }
  return bits;
}

/// Where each document is one segment: the entries first + step * e that belong to a document.
ANYFLASH_HD Word document_bits(const DocumentSide& side, std::int32_t document, std::int64_t first, std::int64_t step) {
  if (document >= side.segment_count) return 0;
  const auto& segment = side.segments[document];
  return interval_bits({first, step}, segment.start, segment.end - 1);
}

template <CellOf of>
ANYFLASH_HD Word place_word(const Program& program, const Atom& atom, const Question& question) {
  constexpr bool keys = of == CellOf::keys;
  const auto size = keys ? program.k_size() : program.q_size();
  const auto stride_one = keys ? atom.stride_q : atom.stride_k, stride_cell = keys ? atom.stride_k : atom.stride_q;
  if (atom.kind == AtomKind::dense) {
    const auto* const row = atom.data + question.place * stride_one;
    return by_rows(question, size, [&](std::int64_t first, std::int64_t step, std::int64_t count) {
      return nonzero_bits(row + first * stride_cell, step * stride_cell, count);
    });
  }
  if (atom.kind == AtomKind::blocks) {
    const std::int64_t block_one = keys ? atom.a[2] : atom.b[2], block_cell = keys ? atom.b[2] : atom.a[2];
    const auto* const row = atom.data + question.place / block_one * stride_one;
    return by_rows(question, size, [&](std::int64_t first, std::int64_t step, std::int64_t count) {
      return block_bits(row, stride_cell, block_cell, first, step, count);
    });
  }
  if (program.rule_restarts) return question.same_document ? all_bits : 0;
  const auto& one = keys ? program.documents.q : program.documents.k;
  const auto& cell = keys ? program.documents.k : program.documents.q;
  const auto document = one.document_of[question.place];
  if (cell.document_of == cell.segment_of) {
    return by_rows(question, size, [&](std::int64_t first, std::int64_t step, std::int64_t count) {
      return document_bits(cell, document, first, step) & low_bits(count);
    });
  }
  return by_rows(question, size, [&](std::int64_t first, std::int64_t step, std::int64_t count) {
    return equal_bits(cell.document_of + first, step, count, document);
  });
}

/// The first n entries of a side: a holds the last of them, an aligned coordinate (raw: of the keys in memory order).
/// in_cell: the cell is on that side.
template <bool in_cell>
ANYFLASH_HD Word first_entries_word(const Program& program, const Atom& atom, const Question& question, bool raw) {
  const std::int64_t last[3] = {atom.a[0], atom.a[1], atom.a[2]};
  if constexpr (in_cell) {
    const auto& cell = question.cell;
    Line lines[3];
    ANYFLASH_UNROLL(1)
    for (int i = 0; i < 3; ++i) lines[i] = raw ? Line{cell.origin[i], cell.step[i]} : question.line[i];
    return order_bits<false>(cell.extent, lines, last, program.dimensions);
  } else {
    std::int64_t y[3] = {question.x[0], question.x[1], question.x[2]};
    if (raw) {
      const auto c = coordinate_of(question.place, program.k_size());
      for (int i = 0; i < 3; ++i) y[i] = c[i];
    }
    return in_order(y, last, program.dimensions) ? all_bits : 0;
  }
}

/// Rules over aligned coordinates.
template <CellOf of>
ANYFLASH_HD Word position_word(const Program& program, const Atom& atom, const Question& question) {
  const auto& extent = question.cell.extent;
  constexpr bool keys = of == CellOf::keys;
  if (atom.kind == AtomKind::prefix) return first_entries_word<keys>(program, atom, question, false);
  if (atom.kind == AtomKind::prefix_queries) return first_entries_word<!keys>(program, atom, question, false);
  Word word = all_bits;
  ANYFLASH_UNROLL(1)
  for (int i = 3 - program.dimensions; i < 3 && atom.kind != AtomKind::causal; ++i) {
    const auto range =
        keys ? keys_of(atom, i, question.x[i], question.size[i]) : queries_of(atom, i, question.x[i], question.size[i]);
    word &= spread(extent, i, range_bits(question.line[i], range));
  }
  const bool ordered = atom.kind == AtomKind::causal || (atom.kind == AtomKind::local && atom.causal);
  if (!ordered || word == 0) return word;
  return word & order_bits<!keys>(extent, question.line, question.x, program.dimensions);
}

template <CellOf of>
ANYFLASH_HD_CALL Word atom_word(const Program& program, const Atom& atom, const Question& question) {
  switch (atom.kind) {
    case AtomKind::full: return all_bits;
    case AtomKind::sink: return first_entries_word<of == CellOf::keys>(program, atom, question, true);
    case AtomKind::documents:
    case AtomKind::blocks:
    case AtomKind::dense: return place_word<of>(program, atom, question);
    default: return deposited(position_word<of>(program, atom, question), question.members);
  }
}

/// The rule's word, also for entries beyond the sequence.
template <CellOf of>
ANYFLASH_HD Word rule_word(const Program& program, const Question& question) {
  const auto one = [&](int i) {
    const auto& atom = program.atoms[i];
    const auto word = atom_word<of>(program, atom, question);
    return atom.negated ? ~word : word;
  };
  if (program.conjunction) {
    Word word = all_bits;
    ANYFLASH_UNROLL(1)
    for (int i = 0; i < program.atom_count && word != 0; ++i) word &= one(i);
    return word;
  }
  Word stack[Program::stack_depth] = {};
  int top = -1;
  ANYFLASH_UNROLL(1)
  for (int i = 0; i < program.op_count; ++i) {
    const auto op = program.ops[i];
    if (op < max_atoms) {
      stack[++top] = one(op);
    } else {
      --top;
      stack[top] = op == Program::op_and ? stack[top] & stack[top + 1] : stack[top] | stack[top + 1];
    }
  }
  return stack[0];
}

/// Where coordinates restart: segment by segment, or document by document.
template <CellOf of>
ANYFLASH_HD Word word_by_documents(const Program& program, Question& question) {
  constexpr bool keys = of == CellOf::keys;
  const auto& one = keys ? program.documents.q : program.documents.k;
  const auto& side = keys ? program.documents.k : program.documents.q;
  const auto& own = one.segments[one.segment_of[question.place]];
  const auto& own_axis = program.documents.axes[own.document];
  const auto own_position = own.base + question.place - own.start;
  question.x[2] = keys ? own_axis.query(own_position) : own_axis.key(own_position);
  question.size[2] = own_axis.r;

  const std::int64_t origin = question.cell.origin[2], step = question.cell.step[2], count = question.count[2];
  const auto first_segment = side.segment_of[origin], last_segment = side.segment_of[origin + (count - 1) * step];
  const bool one_segment = program.documents_required && side.document_of == side.segment_of;
  const bool mixed = !one_segment && step == 1 && last_segment - first_segment > 1 && !program.pieces;
  Word left = low_bits(count);
  if (one_segment) left &= document_bits(side, own.document, origin, step);
  if (mixed && program.documents_required) left = equal_bits(side.document_of + origin, 1, count, own.document);
  Word word = 0;
  ANYFLASH_UNROLL(1)
  while (left != 0) {
    const auto e = lowest_bit(left);
    const auto place = origin + e * step;
    const auto& segment = side.segments[side.segment_of[place]];
    Word members = left;
    if (!mixed) {
      const auto end = step == 1 ? segment.end - origin : (segment.end - origin + step - 1) / step;
      members &= bits_between(e, end - 1);
    } else if (!program.documents_required) {
      members &= equal_bits(side.document_of + origin, 1, count, segment.document);
    }
    left &= ~members;
    question.same_document = segment.document == own.document;
    if (!question.same_document && program.documents_required) continue;
    const auto& axis = program.documents.axes[segment.document];
    // A segment's line is extended as if its document reached back to the cell's first entry.
    const auto first = segment.base + place - segment.start - (mixed ? 0 : e * step);
    question.line[2] = keys ? Line{axis.key(first), step * axis.k_step} : Line{axis.query(first), step * axis.q_step};
    question.members = mixed ? members : all_bits;
    if (!keys) question.size[2] = axis.r;
    word |= rule_word<of>(program, question) & members;
  }
  return word;
}

/// The words of one cell: what depends only on the cell is computed once; then words of entries of the other side are
/// computed.
template <CellOf of>
class CellWords {
 public:
  ANYFLASH_HD CellWords(const Program& program, const Box& cell) : program_(program) {
    question_.cell = cell;
    question_.same_document = true;
    const auto first_dimension = 3 - program.dimensions;
    ANYFLASH_UNROLL(1)
    for (int i = 0; i < first_dimension; ++i) {  // dimensions that the sequence does not have
      question_.count[i] = question_.size[i] = 1;
      question_.x[i] = 0;
      question_.line[i] = {0, 1};
    }
    ANYFLASH_UNROLL(1)
    for (int i = first_dimension; i < 3; ++i) {
      const auto& axis = program.axis[i];
      const std::int64_t step = cell.step[i], left = (keys ? axis.k_size : axis.q_size) - std::int64_t(cell.origin[i]);
      const auto count = step == 1 || left <= 0 ? left : (left + step - 1) / step;
      question_.count[i] = smaller(cell.extent[i], count);
      if (count < cell.extent[i]) inside_ &= count <= 0 ? 0 : spread(cell.extent, i, low_bits(count));
      question_.size[i] = axis.r;
      question_.line[i] = keys ? Line{axis.key(cell.origin[i]), step * axis.k_step}
                               : Line{axis.query(cell.origin[i]), step * axis.q_step};
    }
  }

  /// Bit e: does entry `one` of the other side see entry e of the cell (a cell of keys), or is it seen by it (of
  /// queries)?
  ANYFLASH_HD Word operator()(const Int3& one) {
    if (inside_ == 0) return 0;
    ANYFLASH_UNROLL(1)
    for (int i = 3 - program_.dimensions; i < 3; ++i) {
      question_.x[i] = keys ? program_.axis[i].query(one[i]) : program_.axis[i].key(one[i]);
    }
    question_.place = program_.dimensions == 1 ? one[2] : flat_index(one, keys ? program_.q_size() : program_.k_size());
    return inside_ &
           (program_.rule_restarts ? word_by_documents<of>(program_, question_) : rule_word<of>(program_, question_));
  }

 private:
  static constexpr bool keys = of == CellOf::keys;

  const Program& program_;
  Question question_;
  Word inside_ = all_bits;  // entries that exist
};

using WordsOfKeys =
    CellWords<CellOf::keys>;  ///< WordsOfKeys(program, key_cell)(query) is word(program, query, key_cell)
using WordsOfQueries = CellWords<CellOf::queries>;  ///< the same for word_of_queries

/// Bit e: does the query see entry e of the cell of keys? The query must be in the sequence; bits of keys outside it
/// are 0.
ANYFLASH_HD Word word(const Program& program, const Int3& query, const Box& key_cell) {
  return WordsOfKeys(program, key_cell)(query);
}

/// Bit e: does entry e of the cell of queries see the key? The key must be in the sequence; bits of queries outside it
/// are 0.
ANYFLASH_HD Word word_of_queries(const Program& program, const Int3& key, const Box& query_cell) {
  return WordsOfQueries(program, query_cell)(key);
}

}  // namespace anyflash::rules
