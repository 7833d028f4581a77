// Packed key blocks: K transposed and V, in the compute type. A thread keeps the ones it packed last, since the query
// blocks that it takes one after the other mostly meet the same keys: some times as many as a query block meets, so
// that narrow rules stay in the nearer caches.

#include "cpu/tuning.h"
#include "cpu/walk.h"
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
  Box box;
  T* k_t;                    ///< (d_qk, 64)
  T* v;                      ///< (64, padded d_v)
  std::uint64_t not_finite;  ///< the keys whose values hold a NaN or an infinity
};

template <class T>
class Panels {
 public:
  Panels(const Problem& problem, const ExecutionPlan& plan, T* memory)
      : problem_(problem), plan_(plan), d_qk_(padded(problem.d_qk)), d_v_(padded(problem.d_v)),
        kept_(count(problem, plan)), rows_(memory) {
    memory += kTile * d_qk_;
    for (std::int64_t i = 0; i < kept_.count(); ++i) {
      panels_[i].k_t = std::exchange(memory, memory + kTile * d_qk_);
      panels_[i].v = std::exchange(memory, memory + kTile * d_v_);
    }
  }
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan) {
    return kTile * padded(problem.d_qk) + count(problem, plan) * panel_size(problem);
  }

  /// The panel of a key block of (b, key/value head g); k_size: the keys that exist in b. Valid until the next call.
  const Panel<T>& of(std::int64_t b, std::int64_t g, std::int32_t block, const Int3& k_size) {
    const auto name = name_of(b, g, block);
    if (const auto slot = kept_.find(name); slot >= 0) return panels_[slot];
    Panel<T>& panel = panels_[kept_.put(name)];
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
    return kept_.find(name_of(b, g, block)) >= 0;
  }

 private:
  std::int64_t name_of(std::int64_t b, std::int64_t g, std::int32_t block) const {
    return (b * problem_.heads_kv + g) * plan_.key_grid.count() + block;
  }
  static std::int64_t panel_size(const Problem& problem) {
    return kTile * (padded(problem.d_qk) + padded(problem.d_v));
  }
  static std::int64_t count(const Problem& problem, const ExecutionPlan& plan) {
    const auto fit = tuning::kPanelBytes / (panel_size(problem) * static_cast<std::int64_t>(sizeof(T)));
    const auto wanted = tuning::kPanelTimes * most_met(plan, &MaskGroup::keys_of_query_block);
    return std::max<std::int64_t>(1, std::min({fit, wanted, plan.key_grid.count(), KeptBlocks::most}));
  }

  const Problem& problem_;
  const ExecutionPlan& plan_;
  const std::int64_t d_qk_, d_v_;
  KeptBlocks kept_;
  Panel<T> panels_[KeptBlocks::most];
  T* rows_;
};

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_PANELS_INL_H_
