// Prefetches rows that will be loaded next, a little at a time during other computation, so that neither waits for the
// other. Rules that see few keys would otherwise wait for memory: docs/notes/cpu-forward.md.

#include <cstdint>

#include "cpu/rows-inl.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_AHEAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_AHEAD_INL_H_
#undef ANYFLASH_CPU_AHEAD_INL_H_
#else
#define ANYFLASH_CPU_AHEAD_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

class Ahead {
 public:
  void clear() { count_ = fetched_ = 0, line_ = 0; }

  /// Adds rows whose channels are contiguous. Others, and more than fit, are not prefetched.
  HWY_NOINLINE void add(const Operand& operand, ElementType type, const RowAddresses& address, std::int64_t channels) {
    if (operand.channel != 1) return;
    const auto size = static_cast<std::int64_t>(element_size(type));
    const auto* data = reinterpret_cast<const char*>(operand.data);
    for (std::int32_t row = 0; row < address.count() && count_ < kMost; ++row)
      if (address.exists(row)) rows_[count_++] = {data + address[row] * size, channels * size};
  }

  /// The same for rows at equal distances.
  HWY_NOINLINE void add(const Operand& operand, ElementType type, const EvenRows& rows, int count,
                        std::int64_t channels) {
    const auto size = static_cast<std::int64_t>(element_size(type));
    const auto* const data = reinterpret_cast<const char*>(operand.data) + rows.first * size;
    if (rows.line == channels && count_ < kMost) {
      rows_[count_++] = {data, count * channels * size};
    } else {
      for (int row = 0; row < count && count_ < kMost; ++row)
        rows_[count_++] = {data + row * rows.line * size, channels * size};
    }
  }

  /// Prefetches the next `rows` rows.
  HWY_INLINE void fetch(int rows) {
    for (; rows > 0 && fetched_ < count_; --rows, ++fetched_)
      for (std::int64_t at = 0; at < rows_[fetched_].bytes; at += 64) hwy::Prefetch(rows_[fetched_].data + at);
  }
  /// Prefetches the next `lines` cache lines.
  HWY_INLINE void fetch_lines(int lines) {
    for (; lines > 0 && fetched_ < count_; --lines) {
      hwy::Prefetch(rows_[fetched_].data + line_);
      line_ += 64;
      if (line_ >= rows_[fetched_].bytes) ++fetched_, line_ = 0;
    }
  }

 private:
  struct Row {
    const char* data;
    std::int64_t bytes;
  };
  static constexpr int kMost = 2 * kMaxQueryRows;
  Row rows_[kMost];
  int count_ = 0, fetched_ = 0;
  std::int64_t line_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_AHEAD_INL_H_
