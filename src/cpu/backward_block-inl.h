// The blocks of 64 keys and of 64 queries that a thread has loaded in the backward pass, in its own memory as operands
// of products. Also the tile between the two in use: P and dS, recomputed from Q, K and lse. With AMX several key
// blocks and two query blocks are loaded, with a tile for each query block.
//
// K and V are kept transposed (channels x 64 keys), so that S = Q K^T and dP = dO V^T are plain products whose right
// operand is read in rows. dQ = dS K reads K in rows; dV = P^T dO and dK = dS^T Q read dO and Q in rows. Padding rows
// and channels are zero.

#include "cpu/caches.h"
#include "cpu/spans.h"
#include "cpu/tile_words.h"
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

/// T: the computation's type. E: the type of the products' operands, T or Pair. In right operands, rows with a NaN or
/// an infinity are zeroed and listed in the `_bad` masks: their share is added pair by pair.
template <class T, class E>
class LoadedBlocks {
 public:
  // After `load_queries`.
  E *q, *dout;              ///< left operands (64 queries, channels)
  E *q_right, *dout_right;  ///< right operands (64 queries, channels), Pairs along the queries; with `kInTiles` left
                            ///< operands (channels, 64 queries), since AMX tiles need those in rows
  std::uint64_t q_bad, dout_bad;
  std::int32_t query_rows;  ///< how many queries are loaded, a multiple of kSpanStep; the other rows of p and ds are
                            ///< undefined
  // After `use_keys`.
  E *k_t, *v_t;  ///< right operands (d_qk, 64 keys), (d_v, 64 keys), whole
  E* k_right;    ///< right operand (64 keys, d_qk); the next key block's follows it
  std::uint64_t k_bad;
  std::int32_t key_rows;  ///< how many keys are loaded, likewise
  // After `compute`.
  E *p, *ds;                   ///< (64 queries, 64 keys), Pairs along the queries
  T *p_numbers, *ds_numbers;   ///< P and dS as numbers, if not `of_products`
  E* ds_rows;                  ///< left operand (64 queries, 64 keys), ds_line apart; the next key block's beside it
  std::uint64_t words[kTile];  ///< bit j of words[i]: the pair is visible and the query has a gradient
  std::uint64_t seen[kTile / kSpanRows];  ///< of a partial tile: the keys that one of kSpanRows queries sees
  Span spans[kTile / kSpanRows];          ///< of a partial tile: their span; p and ds are zero outside it

  static constexpr std::int32_t kQueryBlocks = kInTiles<E> ? 2 : 1;  ///< how many can be loaded, each with its tile

  /// key_blocks: how many are loaded at a time.
  LoadedBlocks(const Problem& problem, const ExecutionPlan& plan, const RowTerms<T>& terms, T* memory,
               std::int64_t key_blocks = 1)
      : ds_line(Depth<E>(kTile) * key_blocks),
        problem_(problem),
        plan_(plan),
        terms_(terms),
        d_qk_(padded(problem.d_qk)),
        d_v_(padded(problem.d_v)),
        kept_(kept_count(problem, plan)) {
    const auto take = [&](std::int64_t count) { return std::exchange(memory, memory + count); };
    const auto take_factors = [&](std::int64_t width) { return reinterpret_cast<E*>(take(Depth<E>(kTile) * width)); };
    k_rights_ = take_factors(key_blocks * d_qk_), k_ts_ = take_factors(key_blocks * d_qk_);
    v_ts_ = take_factors(key_blocks * d_v_);
    tiles_ = take(kQueryBlocks * 2 * kTile * kTile), slope_ = take(kTile * kTile);
    use_tile(0);
    all_ds_rows_ = ds;
    if constexpr (kIsPair<E>) {
      all_ds_rows_ = take_factors(kQueryBlocks * key_blocks * kTile);
    } else {
      q_clean_ = take(kTile * d_qk_), dout_clean_ = take(kTile * d_v_);
    }
    rows_ = take(kTile * (kIsPair<E> ? std::max(d_qk_, d_v_) : d_v_));
    queries_ = take(kept_.count() * kTile * (d_qk_ + d_v_));
  }
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan, std::int64_t key_blocks = 1) {
    const auto d_qk = padded(problem.d_qk), d_v = padded(problem.d_v);
    const std::int64_t kept = kTile * kept_count(problem, plan) * (d_qk + d_v);
    const std::int64_t tiles = (2 * kQueryBlocks + 1) * kTile * kTile;
    const auto operands = key_blocks * Depth<E>(kTile) * (2 * d_qk + d_v);
    if (kIsPair<E>) {
      const auto packed = kQueryBlocks * key_blocks * kTile * kTile / 2;
      return kept + tiles + operands + packed + kTile * std::max(d_qk, d_v);
    }
    return kept + tiles + operands + kTile * (d_qk + 2 * d_v);
  }

  /// Loads a key block of key/value head g into `slot`, and uses it. V is left out if only P is wanted.
  HWY_NOINLINE void load_keys(std::int64_t b, std::int64_t g, std::int32_t block, bool with_v, std::int32_t slot = 0) {
    use_keys(block, slot);
    T* const rows = kIsPair<E> ? rows_ : reinterpret_cast<T*>(k_right);
    const RowAddresses keys(problem_.k, b, g, key_box_, problem_.k_size);
    const auto count = key_rows = all_key_rows_[slot] = keys.used();
    LoadRows(problem_.k, problem_.type, keys, count, problem_.d_qk, rows, d_qk_);
    if constexpr (kIsPair<E>) {
      k_bad = RowsNotFinite(rows, d_qk_, count);
      right_operand(rows, count, d_qk_, k_bad, k_right);
    }
    TransposeOperand(rows, d_qk_, k_t, count);  // Pairs are made in place of the rows
    if constexpr (!kIsPair<E>) k_bad = CleanRows(rows, d_qk_, rows, count);
    all_k_bad_[slot] = k_bad;
    if (!with_v) return;
    const RowAddresses values(problem_.v, b, g, key_box_, problem_.k_size);
    LoadRows(problem_.v, problem_.type, values, count, problem_.d_v, rows_, d_v_);
    TransposeOperand(rows_, d_v_, v_t, count);
  }

  /// Makes a loaded key block the one that `compute` uses; call it after the query block is loaded.
  void use_keys(std::int32_t block, std::int32_t slot) {
    key_box_ = plan_.key_grid.box(block), key_block_ = block;
    k_right = k_rights_ + slot * Depth<E>(kTile) * d_qk_, k_t = k_ts_ + slot * Depth<E>(kTile) * d_qk_;
    v_t = v_ts_ + slot * Depth<E>(kTile) * d_v_;
    ds_rows = all_ds_rows_ + (at_ * kTile * ds_line + slot * Depth<E>(kTile));
    k_bad = all_k_bad_[slot], key_rows = all_key_rows_[slot];
  }

  /// Loads a query block unless it is loaded already. at < kQueryBlocks; the block at 1 is next to the one at 0, with a
  /// tile of its own.
  HWY_NOINLINE void load_queries(std::int64_t b, std::int64_t h, std::int32_t block, std::int32_t at = 0) {
    query_box_ = plan_.query_grid.box(block);
    query_block_ = block;
    if constexpr (kQueryBlocks > 1) use_tile(at);
    const auto name = terms_.name(b, h, block), kept = kept_.find(name);
    const auto slot = kept >= 0 ? kept : kept_.put(name, at == 0 ? -1 : first_slot_);
    if (at == 0) first_slot_ = slot;
    T* memory = queries_ + slot * kTile * (d_qk_ + d_v_);
    auto& [bad_of_q, bad_of_dout, rows] = of_kept_[slot];
    const auto take = [&](std::int64_t count) { return reinterpret_cast<E*>(std::exchange(memory, memory + count)); };
    q = take(Depth<E>(kTile * d_qk_)), dout = take(Depth<E>(kTile * d_v_));
    if constexpr (kIsPair<E>) q_right = take(kTile / 2 * d_qk_), dout_right = take(kTile / 2 * d_v_);
    if (kept < 0) {
      const RowAddresses queries(problem_.q, b, h, query_box_, problem_.q_size);
      const RowAddresses douts(problem_.dout, b, h, query_box_, problem_.q_size);
      rows = queries.used();
      bad_of_q = load_left(problem_.q, queries, rows, problem_.d_qk, q, q_right, d_qk_);
      bad_of_dout = load_left(problem_.dout, douts, rows, problem_.d_v, dout, dout_right, d_v_);
    }
    if constexpr (!kIsPair<E>) {
      q_right = bad_of_q ? (CleanRows(q, d_qk_, q_clean_), q_clean_) : q;
      dout_right = bad_of_dout ? (CleanRows(dout, d_v_, dout_clean_), dout_clean_) : dout;
    }
    q_bad = bad_of_q, dout_bad = bad_of_dout, query_rows = rows;
  }

  /// Prefetches the next task's data: its keys, and the last query block that it visits.
  void look_ahead(std::int64_t b, std::int64_t g, std::int32_t next_keys) {
    ahead_.clear();
    if (next_keys >= plan_.key_grid.count()) return;
    const auto h = g * (problem_.heads_q / problem_.heads_kv);
    const auto& [start, runs] = plan_.group(b, h).queries_of_key_block;
    if (start[next_keys] == start[next_keys + 1]) return;
    const RowAddresses keys(problem_.k, b, g, plan_.key_grid.box(next_keys), problem_.k_size);
    const RowAddresses values(problem_.v, b, g, plan_.key_grid.box(next_keys), problem_.k_size);
    ahead_.add(problem_.k, problem_.type, keys, problem_.d_qk);
    ahead_.add(problem_.v, problem_.type, values, problem_.d_v);
    const Run& last = runs[start[next_keys + 1] - 1];
    const auto block = last.first + last.count - 1;
    if (kept_.find(terms_.name(b, h, block)) >= 0) return;
    const Box box = plan_.query_grid.box(block);
    const RowAddresses queries(problem_.q, b, h, box, problem_.q_size),
        douts(problem_.dout, b, h, box, problem_.q_size);
    ahead_.add(problem_.q, problem_.type, queries, problem_.d_qk);
    ahead_.add(problem_.dout, problem_.type, douts, problem_.d_v);
  }

  /// p = P and, if wanted, ds = dS of the loaded blocks. dS is the gradient of the scores, or (`of_products`) of the
  /// products q k^T, as operands.
  HWY_NOINLINE void compute(std::int64_t b, std::int64_t h, TileClass kind, bool with_ds, bool of_products) {
    const auto at = terms_.at(b, h, query_block_);
    const bool masked = find_words(b, h, kind), plain = PlainScores(problem_);
    multiply(kind == TileClass::full || !plain, problem_.d_qk, q, d_qk_, k_t, s_);
    if (with_ds) multiply(kind == TileClass::full, problem_.d_v, dout, d_v_, v_t, ds_numbers);
    if (!plain) FinishScores(problem_, plan_.group(b, h).program, b, h, query_box_, kTile, key_box_, s_, slope_);
    const bool sloped = of_products && problem_.softcap > 0;
    const TileTerms<T> terms{&terms_.lse[at],
                             &terms_.rest[at],
                             &terms_.delta[at],
                             &terms_.dlse[at],
                             masked ? words : nullptr,
                             spans,
                             of_products ? query_rows : kTile,
                             sloped ? slope_ : nullptr,
                             ScaleLeft<T>(problem_),
                             of_products ? static_cast<T>(problem_.scale) : T(1)};
    WithTileKind(terms, with_ds, [&]<class Kind>() {
      if constexpr (kIsPair<E>) {
        if (of_products) return FinishPairs<Kind>(terms, s_, ds_numbers, ds_rows, ds_line, ahead_);
      }
      FinishRows<Kind>(terms, s_, ds_numbers, ahead_);
    });
  }

  const Box& query_box() const { return query_box_; }
  const Box& key_box() const { return key_box_; }
  std::int32_t key_block() const { return key_block_; }
  /// For rows of a block as numbers, between two loads.
  T* scratch() const { return rows_; }

  const std::int64_t ds_line;  ///< in E, between the rows of ds_rows

 private:
  /// The number of query blocks to keep: as many as two key blocks visit, or kQueryBlocks if they do not fit. Measured:
  /// docs/notes/cpu-backward.md.
  static std::int64_t kept_count(const Problem& problem, const ExecutionPlan& plan) {
    if (problem.heads_kv == 0) return kQueryBlocks;
    const auto bytes = kTile * (padded(problem.d_qk) + padded(problem.d_v)) * static_cast<std::int64_t>(sizeof(T));
    const auto met = plan.most_queries * problem.heads_q / problem.heads_kv;
    const auto wanted = std::min(2 * met, plan.query_grid.count() * problem.heads_q / problem.heads_kv);
    const auto most = fit_to_caches(kInTiles<E> ? tuning::kKeptQueryBytesOfTiles : tuning::kKeptQueryBytes);
    const bool allowed = problem.chunks.kept == 0 || wanted <= problem.chunks.kept;
    const bool fits = wanted * bytes <= most && wanted <= KeptBlocks::most;
    return wanted > kQueryBlocks && fits && allowed ? wanted : kQueryBlocks;
  }

  void use_tile(std::int32_t at) {
    at_ = at;
    p_numbers = s_ = tiles_ + at * 2 * kTile * kTile, ds_numbers = s_ + kTile * kTile;
    p = reinterpret_cast<E*>(s_), ds = reinterpret_cast<E*>(ds_numbers);
  }

  /// Rows of a query block as left operand and, for Pairs, as right operand; returns those that are not finite.
  std::uint64_t load_left(const Operand& from, const RowAddresses& address, int count, std::int64_t channels, E* left,
                          E* right, std::int64_t width) {
    T* const rows = kIsPair<E> ? rows_ : reinterpret_cast<T*>(left);
    LoadRows(from, problem_.type, address, count, channels, rows, width);
    const auto bad = RowsNotFinite(rows, width, count);
    if constexpr (kIsPair<E>) {
      PairNeighbours(rows, count * width, left);
      if constexpr (kInTiles<E>) {
        E* const pairs = reinterpret_cast<E*>(rows);  // in place of the rows
        right_operand(rows, count, width, bad, pairs);
        TransposeWords<kTile / 2>(pairs, width, right);
      } else {
        right_operand(rows, count, width, bad, right);
      }
    }
    return bad;
  }

  /// to (64, 64) = rows (64, depth) columns (depth, 64), or only its spans.
  void multiply(bool whole, std::int64_t channels, const E* rows, std::int64_t width, const E* columns, T* to) {
    const auto depth = Depth<E>(channels), row = Depth<E>(width);
    if (whole) return Gemm<false>(kTile, depth, kTile, rows, row, 1, columns, kTile, to, kTile);
    for (std::int32_t i = 0; i < kTile / kSpanRows; ++i) {
      const auto [begin, keys] = spans[i];
      Gemm<false>(kSpanRows, depth, keys, rows + i * kSpanRows * row, row, 1, columns + begin, kTile,
                  to + i * kSpanRows * kTile + begin, kTile);
    }
  }

  /// rows (count, width) without those that are `bad`.
  static void right_operand(const T* rows, int count, std::int64_t width, std::uint64_t bad, Pair* to) {
    PairRows(rows, width, to, count);
    if (bad) CleanPairs(to, width, bad, to);
  }

  /// Fills `words`, `seen` and `spans`; true if any bit may be clear.
  bool find_words(std::int64_t b, std::int64_t h, TileClass kind) {
    const auto live = terms_.live[terms_.block(b, h, query_block_)];
    const auto fill = [&](auto word) {
      for (int row = 0; row < kTile; ++row) words[row] = live >> row & 1 ? word(row) : 0;
    };
    if (kind == TileClass::full) {
      fill([](int) { return ~std::uint64_t{0}; });
      std::fill_n(spans, kTile / kSpanRows, Span{0, kTile});
      return live != ~std::uint64_t{0};
    }
    const auto* const found = tile_words_.of(plan_.group(b, h).program, query_box_, kTile, key_box_);
    fill([&](int row) { return found[row]; });
    for (int i = 0; i < kTile / kSpanRows; ++i)
      seen[i] = seen_by(words + i * kSpanRows, kSpanRows), spans[i] = span_of(seen[i]);
    return true;
  }

  const Problem& problem_;
  const ExecutionPlan& plan_;
  const RowTerms<T>& terms_;
  const std::int64_t d_qk_, d_v_;
  KeptBlocks kept_;
  struct Kept {
    std::uint64_t q_bad, dout_bad;
    std::int32_t rows;
  };
  Kept of_kept_[KeptBlocks::most];
  E *k_rights_, *k_ts_, *v_ts_, *all_ds_rows_;
  std::uint64_t all_k_bad_[tuning::kKeyBlocksOfTiles] = {};
  std::int32_t all_key_rows_[tuning::kKeyBlocksOfTiles] = {};
  T *tiles_, *s_, *slope_, *rows_, *queries_, *q_clean_ = nullptr, *dout_clean_ = nullptr;
  TileWords<kTile> tile_words_;
  Ahead ahead_;
  Box query_box_{}, key_box_{};
  std::int32_t query_block_ = 0, key_block_ = 0, at_ = 0;
  std::int64_t first_slot_ = -1;  // of the query block at 0
};

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_BACKWARD_BLOCK_INL_H_
