// From a Rule to Programs, and what a plan needs to know about a rule before that.
#pragma once

#include <anyflash/attention.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "rules/program.h"

namespace anyflash::rules {

/// The shapes a rule is used on.
struct Shapes {
  int dimensions = 1;
  Int3 q_size{}, k_size{};
  Align align = Align::none_front;
  std::int64_t batch = 1, heads = 1;  ///< query heads
  /// thd: as if the rule ended in & documents_packed(cu_seqlens_q, cu_seqlens_k)
  TensorView cu_seqlens_q, cu_seqlens_k;
};

/// The batch and head axes of the rule's tables (documents, blocks, dense).
struct TableAxes {
  bool tables = false;                     ///< there are tables
  bool batch_axis = false;                 ///< a table has a batch axis, even if of size 1
  bool on_device = false, on_cpu = false;  ///< a table is in GPU memory; a table is in CPU memory
  bool documents = false;                  ///< there are documents
  bool matrices = false;                   ///< there are bitmaps or masks
  std::int64_t batch = 1, heads = 1;       ///< the largest sizes
};
TableAxes table_axes(const Rule& rule);

/// The rule with `full` instead of every table that has a batch axis.
Rule without_batch_tables(const Rule& rule);

/// Facts that do not depend on the sizes of the shapes.
struct Facts {
  bool tables = false;        ///< documents, blocks or dense (or cu_seqlens): not to be cached by `key`. They follow
                              ///< memory order, so blocks of consecutive entries suit them best
  bool matrices = false;      ///< blocks or dense: a tile's class may have to read all of it
  bool batch_varies = false;  ///< a table has a batch axis (of more than 1)
  bool heads_vary = false;    ///< a table has a heads axis
  bool on_device = false;     ///< a table is in GPU memory
  Int3 stride{{1, 1, 1}};  ///< per dimension, the distance of aligned coordinates between the keys that a query can see
  std::string key;         ///< equal for rules with the same meaning; empty with tables
};
/// For a rule that check() has accepted.
Facts facts(const Rule& rule, const Shapes& shapes);

/// Checks everything that can be wrong with a rule on these shapes: numbers for another count of dimensions, too many
/// parts, tables that do not fit. Reads cu_seqlens, but no other table's data. Throws Error.
void check(const Rule& rule, const Shapes& shapes);

/// A hash of the values of the rule's document ids, cumulative lengths and bitmaps. Dense masks are not included: they
/// are read in place, and reading all of one could cost more than a call.
std::uint64_t tables_hash(const Rule& rule);

/// Appends to `key` everything that determines the rule's meaning, including its tables' numbers. Returns false, and
/// `key` is unusable, if a table is a bitmap or a mask, which programs read in place, is in GPU memory, or is long.
bool append_with_tables(const Rule& rule, std::string& key);

/// The rule with the shapes' cu_seqlens, if they are given.
Rule with_lengths(const Rule& rule, const Shapes& shapes);

/// The ids or the cumulative lengths of a rule that has documents; else views that are not given.
struct DocumentTables {
  TensorView q, k;
  bool ids = false;
};
DocumentTables document_tables(const Rule& rule);

struct DocumentTable;

/// Owns the tables that programs point into (documents; blocks and dense are read in place). Programs stay valid when
/// it is moved, and as long as it lives.
class Tables {
 public:
  Tables();
  ~Tables();
  Tables(Tables&&) noexcept;
  Tables& operator=(Tables&&) noexcept;
  std::vector<std::unique_ptr<DocumentTable>> documents;
  std::vector<std::vector<std::uint8_t>> gathered;  ///< rows and columns of bitmaps and masks, for pieces of sequences
};

/// The program of one batch entry and query head; an index may be 0 where the rule's tables have no such axis.
/// key_length: keys of this batch entry if fewer than shapes.k_size (1-dimensional sequences), else -1. Tables still
/// have an entry for each of shapes.k_size. The rule is one that check() has accepted for these shapes. late: tables
/// may be in GPU memory. The program then has null pointers for its documents.
Program compile(const Rule& rule, const Shapes& shapes, std::int64_t batch_index, std::int64_t head_index,
                Tables& tables, std::int64_t key_length = -1, bool late = false);

}  // namespace anyflash::rules
