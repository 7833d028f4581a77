// Decoding, the forward pass for few query rows. PackGQA: all queries of all heads that share a key head are the rows
// of one block, so that K and V are read once for them. Split-KV: long key sequences are split into parts for several
// threads.
//
// A task is one part of one (batch entry, key head): the walk of forward.cpp over that part's key blocks. If the same
// key's heads are closer in memory than the next key, a task has several heads and reads in memory order. (The rows of
// one head are then far apart, often by a power of two.) Afterwards a row's parts are joined by their maxima (Dao et
// al. 2023, "Flash-Decoding"). A part's first key depends only on the keys, so that results have the same bits for any
// number of threads. Bound by reading K and V.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
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

/// Shared by the tasks of a call.
struct FewRows {
  std::int64_t queries, group, rows, parts;  // query heads per key head; queries * group; parts of a key sequence
  std::int64_t heads;                        // key heads of a task; results do not depend on it

  static constexpr int one_head = std::numeric_limits<int>::max();

  /// threads: 0 for the most heads that a task can have, one_head for one.
  FewRows(const Problem& problem, const ExecutionPlan& plan, int threads)
      : queries(problem.queries()),
        group(problem.heads_kv ? problem.heads_q / problem.heads_kv : 0),
        rows(queries * group),
        parts(std::max<std::int64_t>((plan.most_keys + kPartBlocks - 1) / kPartBlocks, 1)) {
    const auto groups = problem.batch * problem.heads_kv;
    const auto fits = [&](std::int64_t count) {
      const bool enough_tasks = threads <= 1 || groups / count * parts >= threads * tuning::kTasksOfThread;
      return problem.heads_kv % count == 0 && (threads == 0 || enough_tasks);
    };
    heads = beside(problem.k) && beside(problem.v) ? std::min(problem.heads_kv, tuning::kMostRowsOfTask / rows) : 1;
    while (heads > 1 && !fits(heads)) --heads;
  }

  /// Can and should the call be computed this way: do the rows fit, and do they see the same keys?
  static bool suit(const Problem& problem, const ExecutionPlan& plan) {
    return problem.dimensions == 1 && plan.query_grid.count() == 1 && plan.query_grid.step[2] == 1 &&
           plan.head_groups == 1 && problem.heads_kv > 0 &&
           problem.queries() * (problem.heads_q / problem.heads_kv) <= tuning::kMostFewRows;
  }

 private:
  /// Whether the heads of a row are closer to each other than rows.
  static bool beside(const Operand& operand) { return std::abs(operand.head) < std::abs(operand.sequence[2]); }
};

inline Box first_rows(Box box, std::int64_t rows) {
  box.extent[2] = static_cast<std::int32_t>(rows);
  return box;
}

/// The results of a part, for each row: (heads, rows, d_v), (heads, rows).
template <class T>
struct Part {
  T* out;
  RowEnd<T>* ends;
};

/// E: the operands of the products Q K^T, T or Pair: the same scores as in a backward pass.
template <class T, class E>
class FewRowsTask {
 public:
  FewRowsTask(const Problem& problem, const ExecutionPlan& plan, const FewRows& shape, T* memory)
      : problem_(problem),
        plan_(plan),
        shape_(shape),
        d_qk_(padded(problem.d_qk)),
        d_v_(padded(problem.d_v)),
        rows_(shape.heads * shape.rows),
        plain_(PlainScores(problem)),
        query_box_(first_rows(plan.query_grid.box(0), shape.queries)) {
    const auto take = [&](std::int64_t count) { return std::exchange(memory, memory + count); };
    q_ = take(shape.heads * even(shape.rows) * d_qk_), k_ = v_ = take(kTile * std::max(d_qk_, d_v_));
    k_t_ = reinterpret_cast<E*>(take(Depth<E>(kTile) * d_qk_));
    v_clean_ = take(kTile * d_v_), s_ = take(rows_ * kTile);
    row_max_ = take(rows_ * kSumLanes), row_sum_ = take(rows_ * kSumLanes), shift_ = take(rows_);
    factor_ = take(rows_);
  }
  static std::int64_t memory_size(const Problem& problem, const ExecutionPlan& plan) {
    const FewRows shape(problem, plan, problem.chunks.any() ? FewRows::one_head : 0);
    const auto d_qk = padded(problem.d_qk), d_v = padded(problem.d_v), rows = shape.heads * shape.rows;
    return shape.heads * even(shape.rows) * d_qk + rows * (kTile + 2 * kSumLanes + 2) + Depth<E>(kTile) * d_qk +
           kTile * (std::max(d_qk, d_v) + d_v);
  }

  /// before: in a second walk, the row ends of the first walk over all parts; null in the first. g: the first of the
  /// key heads.
  HWY_NOINLINE void run(std::int64_t b, std::int64_t g, std::int64_t part, const Part<T>& result,
                        const RowEnd<T>* before) {
    b_ = b, g_ = g;
    load_queries();
    T* const factor = before ? factor_ : nullptr;
    const RowState<T> state{shift_, row_max_, row_sum_, result.out, d_v_, ScaleLeft<T>(problem_), factor};
    before ? state.clear(rows_, before) : state.clear(rows_);
    const auto& group = plan_.group(b, g * shape_.group);
    std::int32_t blocks[kPartBlocks];
    TileClass kinds[kPartBlocks];
    const auto count = blocks_of(group.keys_of_query_block, part, blocks, kinds);
    for (int i = 0; i < count; ++i)
      visit(group.program, blocks[i], i + 1 < count ? blocks[i + 1] : -1, kinds[i], state);
    for (std::int64_t row = 0; row < rows_; ++row)  // results of a second walk are added unscaled
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
    for (std::int64_t head = 0; head < shape_.heads; ++head) {
      T* const rows = q_ + head * even(shape_.rows) * d_qk_;
      for (std::int64_t i = 0; i < shape_.group; ++i) {
        const RowAddresses address(problem_.q, b_, (g_ + head) * shape_.group + i, query_box_, problem_.q_size);
        LoadRows(problem_.q, problem_.type, address, queries, problem_.d_qk, rows + i * queries * d_qk_, d_qk_);
      }
    }
    if constexpr (kIsPair<E>) PairNeighbours(q_, shape_.heads * even(shape_.rows) * d_qk_, reinterpret_cast<Pair*>(q_));
  }
  const E* queries_of(std::int64_t head) const {
    return reinterpret_cast<const E*>(q_) + head * even(shape_.rows) * Depth<E>(d_qk_);
  }

  /// The address of the first rows of a key block, of the first head, if products can read them in place.
  EvenRows in_place(const Operand& operand, const rules::Program& program, const Box& box, int rows, bool fit) const {
    if (!fit || operand.channel != 1) return {};
    return {operand, b_, g_, box, rows, program.k_size(), problem_.pages};
  }
  EvenRows keys_in_place(const rules::Program& program, const Box& box, int keys = kTile) const {
    const bool whole = problem_.d_qk == d_qk_ && problem_.type == kOperandType;
    const bool whole_words = shape_.heads == 1 || problem_.k.head % kNumbers == 0;
    const auto rows = in_place(problem_.k, program, box, keys, whole && whole_words);
    return rows.line % kNumbers == 0 ? rows : EvenRows();
  }
  EvenRows values_in_place(const rules::Program& program, const Box& box, int keys = kTile) const {
    return in_place(problem_.v, program, box, keys, problem_.d_v == d_v_);
  }

  /// The keys of a block that a task computes: they start at `box`'s first key, and their number is a multiple of
  /// kSpanStep.
  struct Seen {
    Box box;
    int count = kTile, exist = kTile;           ///< behind those that exist are the sequence's end and no key
    std::uint64_t words[tuning::kMostFewRows];  ///< of a head's rows
    bool shown = true;                          ///< every row sees every one that exists
    EvenRows keys, values;                      ///< where they lie, if products can read them there

    bool all() const { return shown && exist == count; }
  };

  /// Lists the rows to prefetch, for blocks whose rows are copied. The values are prefetched while the keys are copied.
  /// The keys of the next head or of the next block are prefetched while the values are copied. Products that read
  /// rows in place prefetch on their own.
  void look_ahead(const rules::Program& program, std::int64_t head, const Seen& seen, std::int32_t next) {
    const auto add = [&](const Operand& operand, const EvenRows& even, std::int64_t of_head, const Box& rows,
                         std::int64_t channels) {
      if (even.line != 0) return;
      const RowAddresses address(operand, b_, g_ + of_head, rows, program.k_size(), &problem_.pages);
      ahead_.add(operand, problem_.type, address, channels);
    };
    ahead_.clear();
    if (!seen.shown || seen.values.line == 0) add(problem_.v, EvenRows(), head, seen.box, problem_.d_v);
    const bool last = head + 1 == shape_.heads;
    if (last && next < 0) return;
    const Box next_box = last ? plan_.key_grid.box(next) : seen.box;
    add(problem_.k, keys_in_place(program, next_box), last ? 0 : head + 1, next_box, problem_.d_qk);
  }

  Seen seen_of(const rules::Program& program, std::int32_t block, TileClass kind) const {
    Seen seen;
    seen.box = plan_.key_grid.box(block);
    if (kind != TileClass::full) {
      rules::WordsOfKeys words_of(program, seen.box);
      for (std::int64_t row = 0; row < shape_.rows; ++row)
        seen.words[row] = row < shape_.queries ? words_of(query_box_.entry(static_cast<std::int32_t>(row)))
                                               : seen.words[row - shape_.queries];
      const auto span = span_of(seen_by(seen.words, static_cast<std::int32_t>(shape_.rows)));
      seen.count = span.width;
      if (span.width == 0) return seen;
      seen.box.origin[2] += span.begin * seen.box.step[2];
      const auto left = rules::class_length(program.k_size()[2], seen.box.origin[2], seen.box.step[2]);
      seen.exist = std::min(seen.count, left);
      for (std::int64_t row = 0; row < shape_.rows; ++row) {
        seen.words[row] >>= span.begin;
        seen.shown &= seen.words[row] == ~std::uint64_t{0} >> (kTile - seen.exist);
      }
    }
    seen.keys = keys_in_place(program, seen.box, seen.exist);
    seen.values = values_in_place(program, seen.box, seen.exist);
    return seen;
  }

  void visit(const rules::Program& program, std::int32_t block, std::int32_t next, TileClass kind,
             const RowState<T>& state) {
    const Seen seen = seen_of(program, block, kind);
    if (seen.count == 0) return;
    const auto next_keys = next < 0 ? EvenRows() : keys_in_place(program, plan_.key_grid.box(next));
    // Many rows would transpose keys in registers many times, and AMX tiles need packed keys.
    const bool direct = seen.keys.line != 0 && !kInTiles<E> && shape_.rows < kTransposedOnce;
    const bool copies = !direct || !seen.shown || seen.values.line == 0;
    if (direct) products_in_place(seen, bytes_ahead(problem_.k, seen.keys, problem_.v, seen.values));
    for (std::int64_t head = 0; head < shape_.heads; ++head) {
      if (copies) look_ahead(program, head, seen, next);
      if (!direct) find_products(program, head, seen);
      if (!plain_) finish_scores(program, head, seen.box);
      softmax(head, seen, state);
      if (seen.shown && seen.values.line != 0) {
        add_values_in_place(head, seen, bytes_ahead(problem_.v, seen.values, problem_.k, next_keys), state);
      } else {
        add_values(program, head, seen, state);
      }
    }
  }

  /// The distance in bytes from a row that is read to the row that is prefetched. It leads to the same row of the
  /// tensor that is read next, if both tensors' rows fit the L1 cache. Otherwise that row would be evicted before its
  /// use, and a later row of the same tensor is prefetched.
  std::int64_t bytes_ahead(const Operand& operand, const EvenRows& rows, const Operand& next,
                           const EvenRows& next_rows) const {
    const auto size = static_cast<std::int64_t>(element_size(problem_.type)), line = rows.line * size;
    const auto channels = std::max(problem_.d_qk, problem_.d_v);
    if (shape_.heads == 1 && channels * size <= tuning::kShortRow && next_rows.line == rows.line)
      return next.data - operand.data + (next_rows.first - rows.first) * size;
    const auto ahead = tuning::kBytesAhead / (channels * size);
    return (shape_.heads == 1 ? std::max<std::int64_t>(ahead, 1) : tuning::kRowsAhead) * line;
  }

  void softmax(std::int64_t head, const Seen& seen, const RowState<T>& state) {
    WithWidth(seen.count, [&]<int kWidth>() {
      for (std::int64_t i = 0; i < shape_.rows; ++i) {
        const auto row = head * shape_.rows + i;
        T* const s = s_ + row * kTile;
        seen.all() ? SoftmaxRow<false, kWidth>(0, s, s, row, state)
                   : SoftmaxRow<true, kWidth>(seen.words[i], s, s, row, state);
      }
    });
  }

  /// s = Q K^T of one head.
  void find_products(const rules::Program& program, std::int64_t head, const Seen& seen) {
    if (seen.keys.line != 0 && seen.exist == seen.count) {
      const auto line = seen.keys.line / kNumbers;
      TransposeKeys(seen.count, first_key(seen.keys, head), line, Depth<E>(d_qk_), reinterpret_cast<T*>(k_t_));
    } else {
      load_keys(program, head, seen);
    }
    Gemm<false>(shape_.rows, Depth<E>(problem_.d_qk), seen.count, queries_of(head), Depth<E>(d_qk_), 1, k_t_, kTile,
                s_ + head * shape_.rows * kTile, kTile);
  }
  /// The same for all heads, which are read side by side.
  void products_in_place(const Seen& seen, std::int64_t ahead) {
    const auto bytes = d_qk_ * static_cast<std::int64_t>(element_size(problem_.type));
    seen.keys.line == d_qk_&& bytes <= tuning::kRowInOrder ? products_in_place<Fetch::in_order>(seen, ahead)
                                                           : products_in_place<Fetch::of_rows>(seen, ahead);
  }
  template <Fetch kFetch>
  void products_in_place(const Seen& seen, std::int64_t ahead) {
    const auto depth = Depth<E>(d_qk_), line = seen.keys.line / kNumbers;
    constexpr int keys_at_once = static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
    for (int key = 0; key < seen.count; key += keys_at_once)
      for (std::int64_t head = 0; head < shape_.heads; ++head) {
        const T* const from = first_key(seen.keys, head) + key * line;
        const bool whole = key + keys_at_once <= seen.exist;
        if (!whole) copy_last_keys(from, line, std::max(seen.exist - key, 0), keys_at_once);
        ForRows(shape_.rows, [&]<int kRows>(std::int64_t row) {
          T* const s = s_ + (head * shape_.rows + row) * kTile + key;
          const E* const q = queries_of(head) + row * depth;
          !whole     ? ProductsOfKeys<kRows, Fetch::nothing>(q, depth, k_, depth, s, 0)
          : row == 0 ? ProductsOfKeys<kRows, kFetch>(q, depth, from, line, s, ahead)
                     : ProductsOfKeys<kRows, Fetch::nothing>(q, depth, from, line, s, 0);
        });
      }
  }
  /// To k_: `exist` keys, and zeros in place of the others. Beyond the sequence's end there may be no memory to read.
  void copy_last_keys(const T* from, std::int64_t line, int exist, int keys) {
    const auto depth = Depth<E>(d_qk_);
    for (int key = 0; key < exist; ++key) std::copy_n(from + key * line, depth, k_ + key * depth);
    std::fill_n(k_ + exist * depth, (keys - exist) * depth, T(0));
  }
  /// An E, read as a number of its size. It may straddle two Pairs of the tensor.
  const T* first_key(const EvenRows& rows, std::int64_t head) const {
    const auto offset = (rows.first + head * problem_.k.head) * static_cast<std::int64_t>(element_size(problem_.type));
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(problem_.k.data) + offset);
  }

  void load_keys(const rules::Program& program, std::int64_t head, const Seen& seen) {
    const RowAddresses address(problem_.k, b_, g_ + head, first_rows(seen.box, seen.count), program.k_size(),
                               &problem_.pages);
    LoadRows(problem_.k, problem_.type, address, seen.count, problem_.d_qk, k_, d_qk_);
    ahead_.fetch_lines(lines_of(problem_.d_v) / 2);
    TransposeOperand(k_, d_qk_, k_t_, seen.count);
    ahead_.fetch_lines(lines_of(problem_.d_v) / 2);
  }

  void load_values(const rules::Program& program, std::int64_t head, const Seen& seen) {
    const RowAddresses address(problem_.v, b_, g_ + head, first_rows(seen.box, seen.count), program.k_size(),
                               &problem_.pages);
    LoadRows(problem_.v, problem_.type, address, seen.count, problem_.d_v, v_, d_v_);
    ahead_.fetch_lines(lines_of(problem_.d_qk));
  }
  /// Cache lines of a block of keys.
  int lines_of(std::int64_t channels) const {
    return static_cast<int>(kTile * channels * static_cast<std::int64_t>(element_size(problem_.type)) / 64);
  }

  /// out += P V of one head.
  void add_values(const rules::Program& program, std::int64_t head, const Seen& seen, const RowState<T>& state) {
    load_values(program, head, seen);
    const T* const p = s_ + head * shape_.rows * kTile;
    T* const out = state.out + head * shape_.rows * d_v_;
    const auto not_finite = seen.shown ? 0 : CleanRows(v_, d_v_, v_clean_, seen.count);
    Gemm<true>(shape_.rows, seen.count, d_v_, p, kTile, 1, not_finite ? v_clean_ : v_, d_v_, out, d_v_);
    for (std::int64_t row = 0; not_finite && row < shape_.rows; ++row)
      AddRowsNotFinite(seen.words[row] & not_finite, p + row * kTile, v_, d_v_, problem_.d_v, out + row * d_v_);
  }
  void add_values_in_place(std::int64_t head, const Seen& seen, std::int64_t ahead, const RowState<T>& state) {
    WithMemoryType<T>(problem_.type, [&]<class Memory>(Memory*) HWY_ATTR {
      const auto& rows = seen.values;
      const auto* const from = reinterpret_cast<const Memory*>(problem_.v.data) + rows.first + head * problem_.v.head;
      ForRows(shape_.rows, [&]<int kRows>(std::int64_t row) {
        const auto of_task = head * shape_.rows + row;
        AddValues<kRows>(seen.exist, s_ + of_task * kTile, from, rows.line, d_v_, state.out + of_task * d_v_,
                         row == 0 ? ahead : 0);
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

  void finish_scores(const rules::Program& program, std::int64_t head, const Box& keys) {
    const auto queries = static_cast<std::int32_t>(shape_.queries);
    for (std::int64_t i = 0; i < shape_.group; ++i) {
      T* const s = s_ + (head * shape_.rows + i * queries) * kTile;
      FinishScores<T>(problem_, program, b_, (g_ + head) * shape_.group + i, query_box_, queries, keys, s, nullptr);
    }
  }

  static constexpr std::int64_t kTransposedOnce = 8;   // rows
  static constexpr int kNumbers = kIsPair<E> ? 2 : 1;  // numbers in an E
  static constexpr auto kOperandType = kIsPair<E>       ? ElementType::bfloat16
                                       : sizeof(T) == 8 ? ElementType::float64
                                                        : ElementType::float32;

  const Problem& problem_;
  const ExecutionPlan& plan_;
  const FewRows& shape_;
  const std::int64_t d_qk_, d_v_, rows_;  // rows_: of all heads
  const bool plain_;
  const Box query_box_;
  T *q_, *k_;  // q_ holds E once loaded; k_ is v_, since keys are transposed before values are loaded
  E* k_t_;
  T *v_, *v_clean_, *s_, *row_max_, *row_sum_, *shift_, *factor_;
  Ahead ahead_;
  std::int64_t b_ = 0, g_ = 0;
};

/// Joins row `row` of all parts in their order: the result replaces the first part's, and the row's end is returned.
template <class T>
RowEnd<T> JoinRow(const FewRows& shape, std::int64_t row, std::int64_t width, const Part<T>& first) {
  T* const out = first.out + row * width;
  RowEnd<T> end = first.ends[row];
  for (std::int64_t part = 1; part < shape.parts; ++part) {
    const auto at = part * shape.heads * shape.rows + row;
    const RowEnd<T>& next = first.ends[at];
    const T together = std::max(end.largest, next.largest), shift = together == -kInfinity<T> ? T(0) : together;
    const T mine = std::exp(end.largest - shift), other = std::exp(next.largest - shift);
    for (std::int64_t i = 0; i < width; ++i) out[i] = out[i] * mine + first.out[at * width + i] * other;
    end = {together, end.sum * mine + next.sum * other};
  }
  return end;
}

/// Joins the parts of all rows of (b, g) and stores the results. ends: set to the rows'. False if a second walk is
/// needed.
template <class T>
bool JoinParts(const Problem& problem, const ExecutionPlan& plan, const FewRows& shape, std::int64_t b, std::int64_t g,
               const Part<T>& first, RowEnd<T>* ends, bool again) {
  const auto width = padded(problem.d_v);
  const auto queries = static_cast<std::int32_t>(shape.queries);
  bool good = true;
  for (std::int64_t i = 0; i < shape.group; ++i) {
    const auto h = g * shape.group + i;
    const RowAddresses address(problem.out, b, h, first_rows(plan.query_grid.box(0), queries), problem.q_size);
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
