// Packed key blocks: K transposed and V, as right operands of products. A thread keeps the blocks that it packed last,
// since consecutive query blocks mostly visit the same keys. It keeps several times as many as a query block visits,
// but no more, so that narrow rules stay in the nearer caches.

#include "cpu/caches.h"
#include "cpu/pairs-inl.h"
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

/// E: T, or Pair, along channels in k_t and along keys in v.
template <class T, class E>
struct Panel {
  Box box;
  E* k_t;                    ///< (d_qk, 64)
  E* v;                      ///< (64, padded d_v)
  int keys;                  ///< how many of its keys are packed, a multiple of kSpanStep: no others exist
  std::uint64_t not_finite;  ///< the keys whose values hold a NaN or an infinity
};

template <class T, class E>
class Panels {
 public:
  Panels(const Problem& problem, const ExecutionPlan& plan, T* memory)
      : problem_(problem),
        plan_(plan),
        d_qk_(padded(problem.d_qk)),
        d_v_(padded(problem.d_v)),
        kept_(count(problem, plan)),
        rows_(memory) {
    memory += kTile * std::max(d_qk_, d_v_);
    for (std::int64_t i = 0; i < kept_.count(); ++i) {
      panels_[i].k_t = reinterpret_cast<E*>(std::exchange(memory, memory + Depth<E>(kTile) * d_qk_));
      panels_[i].v = reinterpret_cast<E*>(std::exchange(memory, memory + Depth<E>(kTile) * d_v_));
    }
  }
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan) {
    return kTile * padded(std::max(problem.d_qk, problem.d_v)) + count(problem, plan) * panel_size(problem);
  }

  /// The panel of a key block of (b, key/value head g); k_size: the keys that exist in b. Valid until the next call.
  const Panel<T, E>& of(std::int64_t b, std::int64_t g, std::int32_t block, const Int3& k_size) {
    const auto name = name_of(b, g, block);
    if (const auto slot = kept_.find(name); slot >= 0) return panels_[slot];
    Panel<T, E>& panel = panels_[kept_.put(name)];
    panel.box = plan_.key_grid.box(block);
    const RowAddresses k(problem_.k, b, g, panel.box, k_size, &problem_.pages);
    const RowAddresses v(problem_.v, b, g, panel.box, k_size, &problem_.pages);
    panel.keys = k.used();
    LoadRows(problem_.k, problem_.type, k, panel.keys, problem_.d_qk, rows_, d_qk_);
    TransposeOperand(rows_, d_qk_, panel.k_t, panel.keys);
    T* const values = kIsPair<E> ? rows_ : reinterpret_cast<T*>(panel.v);
    LoadRows(problem_.v, problem_.type, v, panel.keys, problem_.d_v, values, d_v_);
    panel.not_finite = RowsNotFinite(values, d_v_, panel.keys);
    if constexpr (kIsPair<E>) PairRows(rows_, d_v_, panel.v, panel.keys);
    return panel;
  }

  bool holds(std::int64_t b, std::int64_t g, std::int32_t block) const { return kept_.find(name_of(b, g, block)) >= 0; }

 private:
  std::int64_t name_of(std::int64_t b, std::int64_t g, std::int32_t block) const {
    return (b * problem_.heads_kv + g) * plan_.key_grid.count() + block;
  }
  static std::int64_t panel_size(const Problem& problem) {
    return Depth<E>(kTile) * (padded(problem.d_qk) + padded(problem.d_v));
  }
  static std::int64_t count(const Problem& problem, const ExecutionPlan& plan) {
    const auto fit = fit_to_caches(tuning::kPanelBytes) / (panel_size(problem) * static_cast<std::int64_t>(sizeof(T)));
    const auto wanted = tuning::kPanelTimes * plan.most_keys;
    const auto most = problem.chunks.kept > 0 ? problem.chunks.kept : KeptBlocks::most;
    return std::max<std::int64_t>(1, std::min({fit, wanted, plan.key_grid.count(), KeptBlocks::most, most}));
  }

  const Problem& problem_;
  const ExecutionPlan& plan_;
  const std::int64_t d_qk_, d_v_;
  KeptBlocks kept_;
  Panel<T, E> panels_[KeptBlocks::most];
  T* rows_;
};

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_PANELS_INL_H_
