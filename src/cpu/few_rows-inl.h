// The forward pass for few queries (decoding): all queries of all heads that share a key head are the rows of one
// block, so that K and V are read once for them; long key sequences are cut into parts for several threads.
//
// A task is one part of one (batch entry, key head): the walk of forward.cpp over that part's key blocks. Afterwards
// the parts of a row are put together by their maxima (Dao et al. 2023, "Flash-Decoding"). Where a part begins depends
// on the keys alone, so that results are the same bits for any number of threads. Bound by reading K and V.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "cpu/tuning.h"
#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_FEW_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_FEW_ROWS_INL_H_
#undef ANYFLASH_CPU_FEW_ROWS_INL_H_
#else
#define ANYFLASH_CPU_FEW_ROWS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

using tuning::kPartBlocks;

/// What the tasks of a call share.
struct FewRows {
  std::int64_t queries, group, rows, parts;  // query heads a key head; queries * group; parts of a key sequence

  FewRows(const Problem& problem, const ExecutionPlan& plan)
      : queries(problem.queries()), group(problem.heads_kv ? problem.heads_q / problem.heads_kv : 0),
        rows(queries * group),
        parts(std::max<std::int64_t>((most_met(plan, &MaskGroup::keys_of_query_block) + kPartBlocks - 1) / kPartBlocks,
                                     1)) {}

  /// Is it worth it: do the rows fit, and do they see the same keys?
  static bool suit(const Problem& problem, const ExecutionPlan& plan) {
    return problem.dimensions == 1 && plan.query_grid.count() == 1 && plan.query_grid.step[2] == 1 &&
           plan.head_groups == 1 && problem.heads_kv > 0 &&
           problem.queries() * (problem.heads_q / problem.heads_kv) <= tuning::kMostFewRows;
  }
};

/// What a part leaves behind of each row: (rows, d_v), (rows).
template <class T>
struct Part {
  T* out;
  RowEnd<T>* ends;
};

/// E: what the products Q K^T read, T or Pair: the same scores as in a backward pass.
template <class T, class E>
class FewRowsTask {
 public:
  FewRowsTask(const Problem& problem, const ExecutionPlan& plan, const FewRows& shape, T* memory)
      : problem_(problem), plan_(plan), shape_(shape), d_qk_(padded(problem.d_qk)), d_v_(padded(problem.d_v)),
        plain_(PlainScores(problem)), query_box_(plan.query_grid.box(0)) {
    const auto take = [&](std::int64_t count) { return std::exchange(memory, memory + count); };
    q_ = take(even(shape_.rows) * d_qk_), k_ = take(kTile * d_qk_);
    k_t_ = reinterpret_cast<E*>(take(Depth<E>(kTile) * d_qk_));
    v_ = take(kTile * d_v_), v_clean_ = take(kTile * d_v_), s_ = take(shape_.rows * kTile);
    row_max_ = take(shape_.rows * kSumLanes), row_sum_ = take(shape_.rows * kSumLanes), shift_ = take(shape_.rows);
    factor_ = take(shape_.rows);
  }
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan) {
    const auto d_qk = padded(problem.d_qk), d_v = padded(problem.d_v), rows = FewRows(problem, plan).rows;
    return even(rows) * d_qk + rows * (kTile + 2 * kSumLanes + 2) + (kTile + Depth<E>(kTile)) * d_qk + 2 * kTile * d_v;
  }

  /// before: the rows' ends after a first walk over all parts, null in that.
  HWY_NOINLINE void run(std::int64_t b, std::int64_t g, std::int64_t part, const Part<T>& result,
                        const RowEnd<T>* before) {
    b_ = b, g_ = g;
    load_queries();
    T* const factor = before ? factor_ : nullptr;
    const RowState<T> state{shift_, row_max_, row_sum_, result.out, d_v_, ScaleLeft<T>(problem_), factor};
    before ? state.clear(shape_.rows, before) : state.clear(shape_.rows);
    const auto& group = plan_.group(b, g * shape_.group);
    std::int32_t blocks[kPartBlocks];
    TileClass kinds[kPartBlocks];
    const auto count = blocks_of(group.keys_of_query_block, part, blocks, kinds);
    for (int i = 0; i < count; ++i)
      visit(group.program, blocks[i], i + 1 < count ? blocks[i + 1] : -1, kinds[i], state);
    for (std::int64_t row = 0; row < shape_.rows; ++row)  // those of a second walk are added as they are
      result.ends[row] = before ? RowEnd<T>{T(0), T(0)} : SettleRow(row, state);
  }

 private:
  static std::int64_t even(std::int64_t rows) { return (rows + 1) / 2 * 2; }

  /// The key blocks of a part, and their classes.
  static int blocks_of(const RunList& list, std::int64_t part, std::int32_t* blocks, TileClass* kinds) {
    const auto first = part * kPartBlocks, last = first + kPartBlocks;
    std::int64_t met = 0;
    int count = 0;
    for (const Run& run : list.runs) {
      const auto begin = std::max<std::int64_t>(first - met, 0), end = std::min<std::int64_t>(last - met, run.count);
      for (auto i = begin; i < end; ++i) {
        blocks[count] = static_cast<std::int32_t>(run.first + i);
        kinds[count++] = run.kind;
      }
      met += run.count;
    }
    return count;
  }

  void load_queries() {
    const auto queries = static_cast<std::int32_t>(shape_.queries);
    for (std::int64_t i = 0; i < shape_.group; ++i) {
      const RowAddresses address(problem_.q, b_, g_ * shape_.group + i, query_box_, problem_.q_size);
      LoadRows(problem_.q, problem_.type, address, queries, problem_.d_qk, q_ + i * queries * d_qk_, d_qk_);
    }
    if constexpr (kIsPair<E>) PairNeighbours(q_, even(shape_.rows) * d_qk_, reinterpret_cast<Pair*>(q_));
  }

  /// Where the rows of a key block lie, if products can read them there.
  EvenRows in_place(const Operand& operand, const rules::Program& program, const Box& box, bool whole) const {
    if (!whole || operand.channel != 1) return {};
    return {operand, b_, g_, box, program.k_size(), problem_.pages};
  }
  EvenRows keys_in_place(const rules::Program& program, const Box& box) const {
    const bool whole = problem_.d_qk == d_qk_ && problem_.type == kOperandType;
    const auto rows = in_place(problem_.k, program, box, whole);
    return rows.line % kNumbers == 0 ? rows : EvenRows();
  }
  EvenRows values_in_place(const rules::Program& program, const Box& box) const {
    return in_place(problem_.v, program, box, problem_.d_v == d_v_);
  }

  /// While the keys are used, the values are on their way; while those are, the next block's keys.
  void look_ahead(const rules::Program& program, const Box& box, std::int32_t next) {
    const auto add = [&](const Operand& operand, const EvenRows& even, const Box& rows, std::int64_t channels) {
      if (even.line != 0) return ahead_.add(operand, problem_.type, even, kTile, channels);
      const RowAddresses address(operand, b_, g_, rows, program.k_size(), &problem_.pages);
      ahead_.add(operand, problem_.type, address, channels);
    };
    ahead_.clear();
    add(problem_.v, values_in_place(program, box), box, problem_.d_v);
    if (next < 0) return;
    const Box next_box = plan_.key_grid.box(next);
    add(problem_.k, keys_in_place(program, next_box), next_box, problem_.d_qk);
  }

  void visit(const rules::Program& program, std::int32_t block, std::int32_t next, TileClass kind,
             const RowState<T>& state) {
    const Box keys = plan_.key_grid.box(block);
    look_ahead(program, keys, next);
    find_products(program, keys);
    if (!plain_) finish_scores(program, keys);

    if (kind == TileClass::full) {
      for (std::int64_t row = 0; row < shape_.rows; ++row) {
        T* const s = s_ + row * kTile;
        SoftmaxRow<false, kTile>(0, s, s, row, state);
      }
      return add_values(program, keys, state);
    }
    load_values(program, keys);
    std::uint64_t words[tuning::kMostFewRows];
    rules::WordsOfKeys words_of(program, keys);
    for (std::int64_t row = 0; row < shape_.rows; ++row)
      words[row] = row < shape_.queries ? words_of(query_box_.entry(static_cast<std::int32_t>(row)))
                                        : words[row - shape_.queries];
    for (std::int64_t row = 0; row < shape_.rows; ++row)
      SoftmaxRow<true, kTile>(words[row], s_ + row * kTile, s_ + row * kTile, row, state);
    const auto not_finite = CleanRows(v_, d_v_, v_clean_);
    Gemm<true>(shape_.rows, kTile, d_v_, s_, kTile, 1, not_finite ? v_clean_ : v_, d_v_, state.out, d_v_);
    for (std::int64_t row = 0; not_finite && row < shape_.rows; ++row)
      AddRowsNotFinite(words[row] & not_finite, s_ + row * kTile, v_, d_v_, problem_.d_v, state.out + row * d_v_);
  }

  /// s = Q K^T.
  void find_products(const rules::Program& program, const Box& keys) {
    const auto rows = keys_in_place(program, keys);
    if constexpr (!kInTiles<E>) {
      if (rows.line != 0) return products_in_place(rows);
    }
    if (rows.line != 0) {
      TransposeKeys(first_key(rows), rows.line / kNumbers, Depth<E>(d_qk_), reinterpret_cast<T*>(k_t_), ahead_);
    } else {
      load_keys(program, keys);
    }
    const auto* const q = reinterpret_cast<const E*>(q_);
    Gemm<false>(shape_.rows, Depth<E>(problem_.d_qk), kTile, q, Depth<E>(d_qk_), 1, k_t_, kTile, s_, kTile);
  }
  void products_in_place(const EvenRows& rows) {
    const auto* const q = reinterpret_cast<const E*>(q_);
    const auto* const k = first_key(rows);
    const auto depth = Depth<E>(d_qk_), line = rows.line / kNumbers;
    constexpr int keys_at_once = 2 * static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
    for (int key = 0; key < kTile; key += keys_at_once)
      ForRows(shape_.rows, [&]<int kRows>(std::int64_t row) {
        ProductsOfKeys<kRows>(q + row * depth, depth, k + key * line, line, s_ + row * kTile + key,
                              row == 0 ? &ahead_ : nullptr);
      });
  }
  /// An E as a number of its size. It may lie across two Pairs of the tensor.
  const T* first_key(const EvenRows& rows) const {
    const auto offset = rows.first * static_cast<std::int64_t>(element_size(problem_.type));
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(problem_.k.data) + offset);
  }

  void load_keys(const rules::Program& program, const Box& keys) {
    const RowAddresses address(problem_.k, b_, g_, keys, program.k_size(), &problem_.pages);
    LoadRows(problem_.k, problem_.type, address, kTile, problem_.d_qk, k_, d_qk_);
    ahead_.fetch_lines(lines_of(problem_.d_v) / 2);
    TransposeOperand(k_, d_qk_, k_t_);
    ahead_.fetch_lines(lines_of(problem_.d_v) / 2);
  }

  void load_values(const rules::Program& program, const Box& keys) {
    const RowAddresses address(problem_.v, b_, g_, keys, program.k_size(), &problem_.pages);
    LoadRows(problem_.v, problem_.type, address, kTile, problem_.d_v, v_, d_v_);
    ahead_.fetch_lines(lines_of(problem_.d_qk));
  }
  /// Cache lines of a block of keys.
  int lines_of(std::int64_t channels) const {
    return static_cast<int>(kTile * channels * static_cast<std::int64_t>(element_size(problem_.type)) / 64);
  }

  /// out += P V.
  void add_values(const rules::Program& program, const Box& keys, const RowState<T>& state) {
    const auto rows = values_in_place(program, keys);
    if (rows.line == 0) {
      load_values(program, keys);
      return Gemm<true>(shape_.rows, kTile, d_v_, s_, kTile, 1, v_, d_v_, state.out, d_v_);
    }
    constexpr int lanes = static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
    WithMemoryType<T>(problem_.type, [&]<class Memory>(Memory*) HWY_ATTR {
      const auto* const from = reinterpret_cast<const Memory*>(problem_.v.data) + rows.first;
      ForRows(shape_.rows, [&]<int kRows>(std::int64_t row) {
        const auto add = [&]<int kVectors>(std::int64_t c) {
          T* const out = state.out + row * d_v_ + c;
          AddValuesPatch<kRows, kVectors>(s_ + row * kTile, from + c, rows.line, out, d_v_,
                                          row == 0 ? &ahead_ : nullptr);
        };
        std::int64_t c = 0;
        for (; c + kFewVectors * lanes <= d_v_; c += kFewVectors * lanes) add.template operator()<kFewVectors>(c);
        for (; c < d_v_; c += lanes) add.template operator()<1>(c);
      });
    });
  }

  /// run.operator()<n>(row) for all rows, n of them at a time.
  template <class F>
  static void ForRows(std::int64_t rows, const F& run) {
    std::int64_t row = 0;
    for (; row + 4 <= rows; row += 4) run.template operator()<4>(row);
    for (; row + 2 <= rows; row += 2) run.template operator()<2>(row);
    for (; row < rows; ++row) run.template operator()<1>(row);
  }

  void finish_scores(const rules::Program& program, const Box& keys) {
    const auto queries = static_cast<std::int32_t>(shape_.queries);
    for (std::int64_t i = 0; i < shape_.group; ++i) {
      T* const s = s_ + i * queries * kTile;
      FinishScores<T>(problem_, program, b_, g_ * shape_.group + i, query_box_, queries, keys, s, nullptr);
    }
  }

  static constexpr int kNumbers = kIsPair<E> ? 2 : 1;  // that an E holds
  static constexpr auto kOperandType = kIsPair<E>       ? ElementType::bfloat16
                                       : sizeof(T) == 8 ? ElementType::float64
                                                        : ElementType::float32;

  const Problem& problem_;
  const ExecutionPlan& plan_;
  const FewRows& shape_;
  const std::int64_t d_qk_, d_v_;
  const bool plain_;
  const Box query_box_;
  T *q_, *k_;  // q_ holds E once loaded
  E* k_t_;
  T *v_, *v_clean_, *s_, *row_max_, *row_sum_, *shift_, *factor_;
  Ahead ahead_;
  std::int64_t b_ = 0, g_ = 0;
};

/// Row `row` of all parts, put together in their order: in the first part's place, and as the row's end.
template <class T>
RowEnd<T> JoinRow(const FewRows& shape, std::int64_t row, std::int64_t width, const Part<T>& first) {
  T* const out = first.out + row * width;
  RowEnd<T> end = first.ends[row];
  for (std::int64_t part = 1; part < shape.parts; ++part) {
    const auto at = part * shape.rows + row;
    const RowEnd<T>& next = first.ends[at];
    const T together = std::max(end.largest, next.largest), shift = together == -kInfinity<T> ? T(0) : together;
    const T mine = std::exp(end.largest - shift), other = std::exp(next.largest - shift);
    for (std::int64_t i = 0; i < width; ++i) out[i] = out[i] * mine + first.out[at * width + i] * other;
    end = {together, end.sum * mine + next.sum * other};
  }
  return end;
}

/// Puts the parts of all rows of (b, g) together and stores the results. ends: becomes the rows'. False if a second walk
/// is wanted.
template <class T>
bool JoinParts(const Problem& problem, const ExecutionPlan& plan, const FewRows& shape, std::int64_t b, std::int64_t g,
               const Part<T>& first, RowEnd<T>* ends, bool again) {
  const auto width = padded(problem.d_v);
  const auto queries = static_cast<std::int32_t>(shape.queries);
  bool good = true;
  for (std::int64_t i = 0; i < shape.group; ++i) {
    const auto h = g * shape.group + i;
    const RowAddresses address(problem.out, b, h, plan.query_grid.box(0), problem.q_size);
    for (std::int32_t query = 0; query < queries; ++query) {
      const auto row = i * queries + query;
      T* const out = first.out + row * width;
      const RowEnd<T> end = JoinRow(shape, row, width, first);
      if (again) {
        KeepStored(problem, address[query], out);
        continue;
      }
      ends[row] = end;
      good &= FinishRow(problem, plan, b, h, 0, query, ends[row], out);
      StoreStatistics(problem, plan, b, h, 0, query, ends[row]);
    }
    StoreRows(first.out + i * queries * width, width, problem.out, problem.type, address, queries, problem.d_v);
  }
  return good;
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_FEW_ROWS_INL_H_
