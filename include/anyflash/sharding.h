// Sequences that are split over processes: the rule of a part of the queries and keys, and what a split costs.
//
// A sequence is split along its outermost dimension. A process has pieces of it: ranges of that dimension's entries
// (tokens of a text, rows of an image, frames of a video).
#pragma once

#include <cstdint>
#include <vector>

#include <anyflash/explain.h>

namespace anyflash {

/// Entries first .. first + count - 1 of a sequence's outermost dimension.
struct Piece {
  std::int64_t first = 0, count = 0;
  friend bool operator==(const Piece&, const Piece&) = default;
};
using Pieces = std::vector<Piece>;

/// The rule between some queries and some keys of whole sequences, for calls on these queries and keys alone, in the
/// order of their pieces. Coordinates, alignment, documents and tables are those of the whole sequences. A call with it
/// gives exactly the pairs that the rule makes visible there.
///
/// q_shape, k_shape: the sizes of the whole sequences. queries, keys: ascending, without overlap. Only sequences of one
/// dimension may have several pieces a side. The rule's tables cover the whole sequences and are on the CPU.
/// key_lengths: (batch), those of the whole call, if it has them. The call with the part then has its own: how many of
/// its keys come before each length.
/// The part is a rule of its own: it cannot be combined with others or read from text. Throws Error.
Rule part(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape, Pieces queries, Pieces keys,
          const TensorView& key_lengths = {});

/// For the queries of each process the keys that they see, in any batch entry or head: pieces whose ends are multiples
/// of `unit`, or the end of the keys. It never misses a key; at most it names units of which no key is seen. Without
/// queries the rule is only checked. key_lengths: those of the call's batch entries, if it has them. Throws Error.
std::vector<Pieces> seen_keys(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape, Align align,
                              const std::vector<Pieces>& queries, std::int64_t unit = 64,
                              const std::vector<std::int64_t>& key_lengths = {});

/// For blocks of queries (entries cuts[i] .. cuts[i + 1] - 1 of the outermost dimension) the number of keys that they
/// see, summed over their queries: counted at `samples` spread queries of each block (one, if more would take
/// long) and scaled up. It is the mean of all batch entries and heads, or of 4 of many key_lengths. Throws Error.
std::vector<double> visible_by_block(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                                     Align align, const std::vector<std::int64_t>& cuts, std::int64_t samples = 4,
                                     const std::vector<std::int64_t>& key_lengths = {});

/// (query blocks, key blocks), row-major: 1 where a query of the block may see a key of the block, in any batch entry
/// or head. Throws Error.
std::vector<std::uint8_t> seen_blocks(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                                      Align align, const std::vector<std::int64_t>& q_cuts,
                                      const std::vector<std::int64_t>& k_cuts,
                                      const std::vector<std::int64_t>& key_lengths = {});

/// Sequences split over processes: the pieces of each, and how many pairs of a query and a key its queries see, about.
struct SequenceSplit {
  std::vector<Pieces> queries, keys;
  std::vector<double> visible_pairs;
};

/// Splits sequences over processes, as many entries to each within one block. Among such splits it takes the one with the
/// least work in the busiest process, and little to exchange: contiguous parts for windows, zigzag for causal. Keys lie
/// where their queries lie if the shapes are equal, else in contiguous parts. Throws Error.
SequenceSplit split_sequence(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape, Align align,
                             std::int64_t ranks);

/// The unit in which processes send each other keys: entries of the outermost dimension.
std::int64_t exchange_unit(const SequenceShape& k_shape);

/// How many keys each process receives, if it is sent whole units with keys that its queries see and it lacks.
std::vector<std::int64_t> received_keys(const Rule& rule, const SequenceShape& q_shape, const SequenceShape& k_shape,
                                        Align align, const SequenceSplit& split, std::int64_t unit);

/// A hash of the rule's meaning: its text, and the values of all tables on the CPU but dense masks.
std::uint64_t rule_hash(const Rule& rule);

}  // namespace anyflash
