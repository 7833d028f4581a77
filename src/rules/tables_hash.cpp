// Has a table changed since a plan was made of it?
#include "rules/compile.h"
#include "rules/node.h"

namespace anyflash::rules {
namespace {

/// Entries from `axis` on, those of `data` first. Bytes count as zero or not.
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

}  // namespace

std::uint64_t tables_hash(const Rule& rule) {
  std::uint64_t hash = 1;
  add(rule.node(), hash);
  return hash;
}

}  // namespace anyflash::rules
