// Hashes of tables' values: has a table changed since a plan was made of it, and is it equal to another's?
#include "rules/compile.h"
#include "rules/id_runs.h"
#include "rules/node.h"

namespace anyflash::rules {
namespace {

/// Hashes entries from `axis` on, those of `data` first. Bytes count only as zero or not.
template <typename T>
void add(const T* data, const TensorView& table, int axis, std::uint64_t& hash) {
  for (std::int64_t i = 0; i < table.shape[axis]; ++i, data += table.strides[axis]) {
    if (axis + 1 < table.rank) {
      add(data, table, axis + 1, hash);
    } else {
      hash = (hash ^ static_cast<std::uint64_t>(sizeof(T) == 1 ? T(*data != 0) : *data)) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 32;
    }
  }
}

void add(const Node& node, std::uint64_t& hash) {
  if (node.left) add(*node.left, hash);
  if (node.right) add(*node.right, hash);
  if (node.kind == NodeKind::dense) return;
  for (const auto* table : {&node.table_q, &node.table_k}) {
    if (!table->given() || table->elements() == 0 || table->device.kind != DeviceKind::cpu) continue;
    switch (table->type) {
      case ElementType::int32: add(static_cast<const std::int32_t*>(table->data), *table, 0, hash); break;
      case ElementType::int64: add(static_cast<const std::int64_t*>(table->data), *table, 0, hash); break;
      default: add(static_cast<const std::uint8_t*>(table->data), *table, 0, hash);
    }
  }
}

constexpr std::size_t longest_key = 4 << 20;

/// Appends equal neighbours as their end and value. Returns false, with nothing appended, if that is no shorter.
template <typename T>
bool append_runs(const T* numbers, std::int64_t step, std::int64_t count, std::string& key) {
  const auto before = key.size();
  for (std::int64_t i = 0, end = 0; i < count; i = end) {
    end = end_of_run(numbers, step, count, i);
    if (key.size() - before >= std::size_t(count) * sizeof(T) / 2) {
      key.resize(before);
      return false;
    }
    key.append(reinterpret_cast<const char*>(&end), sizeof(end));
    key.append(reinterpret_cast<const char*>(numbers + i * step), sizeof(T));
  }
  return true;
}

template <typename T>
void append_numbers(const TensorView& table, std::string& key) {
  const auto rows = table.rank == 2 ? table.shape[0] : 1, columns = table.shape[table.rank - 1];
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto step = table.strides[table.rank - 1];
    const auto* const from = static_cast<const T*>(table.data) + (table.rank == 2 ? row * table.strides[0] : 0);
    key.push_back('r');
    if (append_runs(from, step, columns, key)) continue;
    key.back() = 'n';
    if (step == 1) {
      key.append(reinterpret_cast<const char*>(from), std::size_t(columns) * sizeof(T));
    } else {
      for (std::int64_t i = 0; i < columns; ++i) key.append(reinterpret_cast<const char*>(from + i * step), sizeof(T));
    }
  }
}

bool append_tables(const Node& node, std::string& key) {
  if (node.left && !append_tables(*node.left, key)) return false;
  if (node.right && !append_tables(*node.right, key)) return false;
  if (node.kind == NodeKind::blocks || node.kind == NodeKind::dense) return false;
  const auto &q = node.table_q, &k = node.table_k;
  if (!q.given()) return true;
  const bool same =
      q.data == k.data && q.type == k.type && q.rank == k.rank && q.shape == k.shape && q.strides == k.strides;
  for (const auto* table : {&q, &k}) {
    if (table->device.kind != DeviceKind::cpu) return false;
    if (key.size() + std::size_t(table->elements()) * 8 > longest_key) return false;
    const std::int64_t about[] = {same, std::int64_t(table->type), table->rank, table->shape[0],
                                  table->rank == 2 ? table->shape[1] : 0};
    key.append(reinterpret_cast<const char*>(about), sizeof(about));
    if (table->elements() > 0) {
      table->type == ElementType::int64 ? append_numbers<std::int64_t>(*table, key)
                                        : append_numbers<std::int32_t>(*table, key);
    }
    if (same) break;
  }
  return true;
}

}  // namespace

bool append_with_tables(const Rule& rule, std::string& key) {
  key += rule.text();
  return append_tables(rule.node(), key);
}

std::uint64_t tables_hash(const Rule& rule) {
  std::uint64_t hash = 1;
  add(rule.node(), hash);
  return hash;
}

}  // namespace anyflash::rules
