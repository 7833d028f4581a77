// Between the caller's tensors and the tiles: rows of any strides, one by one.
#pragma once

#include <cstdint>

#include "problem/tensor.h"
#include "tile_machine/mapping.h"

namespace anyflash::simulator {

class Host {
 public:
  explicit Host(const Call& call) : call_(call) {}

  /// Copies the row of a position: q, out, dout of head h, or k, v of key head h.
  void load_query(const Operand& operand, std::int64_t b, std::int64_t h, std::int64_t position, std::int64_t channels,
                  char* to) const {
    load(operand, offset(operand, b, h, call_.queries.coordinate(position)), channels, to);
  }
  void load_key(const Operand& operand, std::int64_t b, std::int64_t h, std::int64_t position, std::int64_t channels,
                char* to) const {
    load(operand, key_offset(operand, b, h, position), channels, to);
  }
  void store_query(const Operand& operand, std::int64_t b, std::int64_t h, std::int64_t position, std::int64_t channels,
                   const char* from) const {
    store(operand, offset(operand, b, h, call_.queries.coordinate(position)), channels, from);
  }
  void store_key(const Operand& operand, std::int64_t b, std::int64_t h, std::int64_t position, std::int64_t channels,
                 const char* from) const {
    store(operand, key_offset(operand, b, h, position), channels, from);
  }

  float* statistic(const RowStatistic& statistic, std::int64_t b, std::int64_t h, std::int64_t position) const {
    const auto at = b * statistic.batch + h * statistic.head + call_.queries.flat(position) * statistic.query;
    return reinterpret_cast<float*>(statistic.data) + at;
  }
  /// The element of a bias for a pair, broadcast or not.
  static std::int64_t bias_offset(const Bias& bias, std::int64_t b, std::int64_t h, std::int64_t query,
                                  std::int64_t key) {
    return b * bias.stride[0] + h * bias.stride[1] + query * bias.stride[2] + key * bias.stride[3];
  }

 private:
  static constexpr std::int64_t nowhere = INT64_MIN;
  static std::int64_t offset(const Operand& operand, std::int64_t b, std::int64_t h, const Int3& c) {
    auto at = b * operand.batch + h * operand.head;
    for (int i = 0; i < 3; ++i) at += c[i] * operand.sequence[i];
    return at;
  }
  std::int64_t key_offset(const Operand& operand, std::int64_t b, std::int64_t h, std::int64_t position) const {
    const auto& pages = call_.problem.pages;
    if (!pages.table) return offset(operand, b, h, call_.keys.coordinate(position));
    const auto key = call_.keys.flat(position);
    const auto length = integer_at(call_.problem.key_lengths, b);
    if (key >= length) return nowhere;
    const auto page = pages.table[b * pages.table_batch + key / pages.page_size * pages.table_page];
    return page * operand.batch + h * operand.head + key % pages.page_size * operand.sequence[2];
  }
  void load(const Operand& operand, std::int64_t at, std::int64_t channels, char* to) const;
  void store(const Operand& operand, std::int64_t at, std::int64_t channels, const char* from) const;

  const Call& call_;
};

}  // namespace anyflash::simulator
