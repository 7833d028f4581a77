// Packed key blocks: K transposed and V, in the compute type. A thread keeps the ones it packed last, since the query
// blocks that it takes one after the other mostly meet the same keys: some times as many as a query block meets, so
// that narrow rules stay in the nearer caches.

#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_PANELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_PANELS_INL_H_
#undef ANYFLASH_CPU_PANELS_INL_H_
#else
#define ANYFLASH_CPU_PANELS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

template <class T>
struct Panel {
  Box box{};
  T* k_t = nullptr;              ///< (d_qk, 64)
  T* v = nullptr;                ///< (64, padded d_v)
  std::uint64_t not_finite = 0;  ///< the keys whose values hold a NaN or an infinity
};

template <class T>
class Panels {
 public:
  /// Bytes a thread keeps: 8192 keys of d64 in float32. Measured: docs/design-log.md.
  static constexpr std::int64_t kBytes = std::int64_t{4} << 20;
  static constexpr std::int64_t kTimes = 8;  ///< as many as the query block that meets most: likewise

  Panels(const Problem& problem, const ExecutionPlan& plan, T* memory)
      : problem_(problem), plan_(plan), d_qk_(padded(problem.d_qk)), d_v_(padded(problem.d_v)),
        panels_(count(problem, plan)), packed_(panels_.size(), -1), rows_(memory) {
    memory += kTile * d_qk_;
    for (auto& panel : panels_) {
      panel.k_t = std::exchange(memory, memory + kTile * d_qk_);
      panel.v = std::exchange(memory, memory + kTile * d_v_);
    }
  }
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan) {
    return kTile * padded(problem.d_qk) + count(problem, plan) * panel_size(problem);
  }

  /// The panel of a key block of (b, key/value head g); k_size: the keys that exist in b. Valid until the next call.
  const Panel<T>& of(std::int64_t b, std::int64_t g, std::int32_t block, const Int3& k_size) {
    const auto name = name_of(b, g, block);
    if (const auto at = find(name); at < panels_.size()) return panels_[at];
    packed_[next_] = name;
    Panel<T>& panel = panels_[next_];
    next_ = (next_ + 1) % panels_.size();
    panel.box = plan_.key_grid.box(block);
    const auto load = [&](const Operand& operand, std::int64_t channels, T* to, std::int64_t width) {
      const RowAddresses address(operand, b, g, panel.box, k_size, &problem_.pages);
      LoadRows(operand, problem_.type, address, kTile, channels, to, width);
    };
    load(problem_.k, problem_.d_qk, rows_, d_qk_);
    TransposeRows(rows_, d_qk_, panel.k_t);
    load(problem_.v, problem_.d_v, panel.v, d_v_);
    panel.not_finite = RowsNotFinite(panel.v, d_v_);
    return panel;
  }

  bool holds(std::int64_t b, std::int64_t g, std::int32_t block) const {
    return find(name_of(b, g, block)) < panels_.size();
  }

 private:
  std::int64_t name_of(std::int64_t b, std::int64_t g, std::int32_t block) const {
    return (b * problem_.heads_kv + g) * plan_.key_grid.count() + block;
  }
  std::size_t find(std::int64_t name) const {
    return static_cast<std::size_t>(std::find(packed_.begin(), packed_.end(), name) - packed_.begin());
  }
  static std::int64_t panel_size(const Problem& problem) {
    return kTile * (padded(problem.d_qk) + padded(problem.d_v));
  }
  static std::int64_t count(const Problem& problem, const ExecutionPlan& plan) {
    const auto fit = kBytes / (panel_size(problem) * static_cast<std::int64_t>(sizeof(T)));
    std::int64_t most = 1;  // key blocks that a query block meets
    for (const MaskGroup& group : plan.groups) {
      const RunList& list = group.keys_of_query_block;
      for (std::size_t block = 0; block + 1 < list.start.size(); ++block) {
        std::int64_t met = 0;
        for (auto i = list.start[block]; i < list.start[block + 1]; ++i) met += list.runs[i].count;
        most = std::max(most, met);
      }
    }
    return std::max<std::int64_t>(1, std::min({fit, plan.key_grid.count(), kTimes * most}));
  }

  const Problem& problem_;
  const ExecutionPlan& plan_;
  const std::int64_t d_qk_, d_v_;
  std::vector<Panel<T>> panels_;
  std::vector<std::int64_t> packed_;  ///< what each holds
  std::size_t next_ = 0;
  T* rows_;
};

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_PANELS_INL_H_
