// A pair of blocks in the backward pass: 64 keys and 64 queries, loaded into a thread's own memory in the compute type,
// and the tile between them: P and dS, recomputed from Q, K and lse.
//
// K and V are kept transposed (channels x 64 keys), so that S = Q K^T and dP = dO V^T are plain products whose right
// operand is read in rows; dQ = dS K reads K in rows. Padding rows and channels are zero.

#include "cpu/spans.h"
#include "cpu/walk.h"
#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_BACKWARD_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_BACKWARD_BLOCK_INL_H_
#undef ANYFLASH_CPU_BACKWARD_BLOCK_INL_H_
#else
#define ANYFLASH_CPU_BACKWARD_BLOCK_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

using tuning::kSpanRows;

template <class T>
class BlockPair {
 public:
  T *q, *dout;                 ///< after `load_queries`, rows: (64, padded channels); q is scale * Q where PlainScores,
                               ///< as in the forward pass, so that S comes out the same to the last bit and fits lse
  T *k, *k_t, *v_t;            ///< rows; (d_qk, 64); (d_v, 64)
  T *p, *ds;                   ///< (64 queries, 64 keys), after `compute`
  std::uint64_t words[kTile];  ///< after `compute`: bit j of words[i]: the pair is visible and the query has a gradient
  std::uint64_t seen[kTile / kSpanRows];  ///< after `compute`: the keys that one of kSpanRows queries sees
  Span spans[kTile / kSpanRows];          ///< and their span; p and ds are zero outside it

  BlockPair(const Problem& problem, const ExecutionPlan& plan, const RowTerms<T>& rows, T* memory)
      : problem_(problem), plan_(plan), rows_(rows), d_qk_(padded(problem.d_qk)), d_v_(padded(problem.d_v)),
        kept_(kept_count(problem, plan)) {
    const auto take = [&](std::int64_t count) { return std::exchange(memory, memory + count); };
    k = take(kTile * d_qk_), k_t = take(kTile * d_qk_), v_t = take(kTile * d_v_);
    p = take(kTile * kTile), ds = take(kTile * kTile), slope_ = take(kTile * kTile);
    v_rows_ = take(kTile * d_v_), queries_ = take(kept_.count() * kTile * (d_qk_ + d_v_));
  }
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan) {
    const auto d_qk = padded(problem.d_qk), d_v = padded(problem.d_v);
    return kTile * (2 * d_qk + 2 * d_v + 3 * kTile + kept_count(problem, plan) * (d_qk + d_v));
  }

  /// Loads a key block of key/value head g. V is left out if only P is wanted.
  void load_keys(std::int64_t b, std::int64_t g, std::int32_t block, bool with_v) {
    key_box_ = plan_.key_grid.box(block);
    LoadRows(problem_.k, problem_.type, b, g, key_box_, problem_.k_size, problem_.d_qk, k, d_qk_);
    TransposeRows(k, d_qk_, k_t);
    if (!with_v) return;
    LoadRows(problem_.v, problem_.type, b, g, key_box_, problem_.k_size, problem_.d_v, v_rows_, d_v_);
    TransposeRows(v_rows_, d_v_, v_t);
  }

  void load_queries(std::int64_t b, std::int64_t h, std::int32_t block) {
    query_box_ = plan_.query_grid.box(block);
    query_block_ = block;
    const auto name = rows_.block(b, h, block), kept = kept_.find(name);
    q = queries_ + (kept >= 0 ? kept : kept_.put(name)) * kTile * (d_qk_ + d_v_), dout = q + kTile * d_qk_;
    if (kept >= 0) return;
    LoadRows(problem_.q, problem_.type, b, h, query_box_, problem_.q_size, problem_.d_qk, q, d_qk_);
    if (PlainScores(problem_)) ScaleScores(static_cast<T>(problem_.scale), q, kTile * d_qk_);
    LoadRows(problem_.dout, problem_.type, b, h, query_box_, problem_.q_size, problem_.d_v, dout, d_v_);
  }

  /// p = P and, if wanted, ds = dS of the loaded blocks, or (`of_products`) the gradient of the products q k^T.
  void compute(std::int64_t b, std::int64_t h, TileClass kind, bool with_ds, bool of_products) {
    const auto at = rows_.at(b, h, query_block_);
    const bool masked = find_words(b, h, kind), plain = PlainScores(problem_);
    multiply(kind == TileClass::full || !plain, problem_.d_qk, q, d_qk_, k_t, p);
    if (with_ds) multiply(kind == TileClass::full, problem_.d_v, dout, d_v_, v_t, ds);
    if (!plain) FinishScores(problem_, plan_.group(b, h).program, b, h, query_box_, kTile, key_box_, p, slope_);
    const bool sloped = of_products && problem_.softcap > 0;
    FinishTile(TileTerms<T>{&rows_.lse[at], &rows_.delta[at], &rows_.dlse[at], masked ? words : nullptr,
                            spans, sloped ? slope_ : nullptr, of_products && !plain ? static_cast<T>(problem_.scale) : T(1)},
               p, with_ds ? ds : nullptr);
  }

  const Box& query_box() const { return query_box_; }
  const Box& key_box() const { return key_box_; }

 private:
  /// Query blocks kept: as many as two key blocks meet, or one, if they do not fit. Measured: docs/design-log.md.
  static std::int64_t kept_count(const Problem& problem, const ExecutionPlan& plan) {
    if (problem.heads_kv == 0) return 1;
    const auto bytes = kTile * (padded(problem.d_qk) + padded(problem.d_v)) * static_cast<std::int64_t>(sizeof(T));
    const auto met = most_met(plan, &MaskGroup::queries_of_key_block) * problem.heads_q / problem.heads_kv;
    const auto wanted = std::min(2 * met, plan.query_grid.count() * problem.heads_q / problem.heads_kv);
    return wanted > 0 && wanted * bytes <= tuning::kKeptQueryBytes && wanted <= KeptBlocks::most ? wanted : 1;
  }

  /// to (64, 64) = rows (64, depth) columns (depth, 64), or its spans alone.
  void multiply(bool whole, std::int64_t depth, const T* rows, std::int64_t width, const T* columns, T* to) {
    if (whole) return Gemm<false>(kTile, depth, kTile, rows, width, 1, columns, kTile, to, kTile);
    for (std::int32_t i = 0; i < kTile / kSpanRows; ++i) {
      const auto [begin, keys] = spans[i];
      Gemm<false>(kSpanRows, depth, keys, rows + i * kSpanRows * width, width, 1, columns + begin, kTile,
                  to + i * kSpanRows * kTile + begin, kTile);
    }
  }

  /// Fills `words`, `seen` and `spans`; true if any bit may be clear.
  bool find_words(std::int64_t b, std::int64_t h, TileClass kind) {
    const auto live = rows_.live[rows_.block(b, h, query_block_)];
    const auto fill = [&](auto word) {
      for (int row = 0; row < kTile; ++row) words[row] = live >> row & 1 ? word(row) : 0;
    };
    if (kind == TileClass::full) {
      fill([](int) { return ~std::uint64_t{0}; });
      std::fill_n(spans, kTile / kSpanRows, Span{0, kTile});
      return live != ~std::uint64_t{0};
    }
    rules::WordsOfKeys words_of(plan_.group(b, h).program, key_box_);
    fill([&](int row) { return words_of(query_box_.entry(row)); });
    for (int i = 0; i < kTile / kSpanRows; ++i)
      seen[i] = seen_by(words + i * kSpanRows, kSpanRows), spans[i] = span_of(seen[i]);
    return true;
  }

  const Problem& problem_;
  const ExecutionPlan& plan_;
  const RowTerms<T>& rows_;
  const std::int64_t d_qk_, d_v_;
  KeptBlocks kept_;
  T *slope_, *v_rows_, *queries_;
  Box query_box_{}, key_box_{};
  std::int32_t query_block_ = 0;
};

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_BACKWARD_BLOCK_INL_H_
