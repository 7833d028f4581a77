// The forward pass on Hopper (sm_90a) for float64 and head sizes up to 128; forward_split.cuh describes the algorithm.
//
// A task is a query block of a head, 128 queries, 16 for each of eight warps. Q is in shared memory. TMA loads keys and
// values, 16 rows at a time, into a ring of stages. A warp works on 32 keys: S = Q K^T from shared memory; hidden pairs
// -inf; P by the online softmax; O += P V, with S, P and O in registers. Two warps share a sub-core: while one computes
// exponentials the other multiplies. Their order is not forced, since alternating at S cost more than it gained.
//
// Bound by the tensor cores, 64 cycles for a 16 x 8 x 16 product, and by other float64 arithmetic, which shares their
// time: 13 operations per pair, some 110 cycles of 1024 at 128 channels. So maxima are compared by the upper halves of
// numbers, as integers. Operands use 56 % of the shared memory bandwidth.
//
// A row's shift lags behind its maximum (portable/softmax.cuh); statistics use it too. A score or result that is not
// finite is reported, and the non-finite fallback, the portable kernel, computes all again. Numbers that no query sees
// are not reported: rows of keys and values that no query of the block sees are cleared as they arrive.
#pragma once

#include "cuda/hopper/double_products.cuh"
#include "cuda/hopper/forward_args.h"
#include "cuda/portable/scores.cuh"
#include "cuda/portable/softmax.cuh"
#include "cuda/portable/walk.cuh"
#include "cuda/tile/pipeline.cuh"
#include "cuda/tile/runs.cuh"

namespace anyflash::cuda {

template <int depth>
struct DoubleForwardShared {
  static constexpr int kDepth = depth, kStages = depth == 64 ? 12 : 6;
  /// The facts of a key block stay for so many blocks: the producer may be a round of stages ahead of the last reader.
  static constexpr int kKnown = depth == 64 ? 4 : 2;
  alignas(1024) double q[2][64 * depth];
  alignas(1024) double rows[kStages][16 * depth];  ///< of K or V
  Word words[kKnown][128];                         ///< of a key block
  std::int32_t key_block[kKnown];                  ///< 2n: block n; 2n + 1: the same, partial; -1: the task ends
  std::int32_t b, h, block;                        ///< the task; block -1: no more tasks
  Barrier queries_full, queries_empty, full[kStages], empty[kStages];
  Barrier copied;  ///< rows to be partly cleared before they count as full

  /// Called by one thread, before a barrier of the thread block.
  __device__ __forceinline__ void begin() {
    queries_full.begin(1), queries_empty.begin_for_warps(8), copied.begin_for_warps(1);
    for (int i = 0; i < kStages; ++i) full[i].begin_for_warps(1), empty[i].begin_for_warps(8);
    barriers_begun();
  }
};

/// The producer warp: for each key block, or half of one at the end, it loads keys and values of 32 rows each, in four
/// stages.
template <int kDepth>
class DoubleForwardLoader {
 public:
  using Shared = DoubleForwardShared<kDepth>;

  __device__ __forceinline__ DoubleForwardLoader(const DoubleForwardArgs& args, Shared& shared)
      : args_(args), shared_(shared) {}

  __device__ __forceinline__ void run() {
    std::int32_t task = blockIdx.x;
    for (unsigned n = 0;; ++n) {
      shared_.queries_empty.wait(n % 2 ^ 1);
      if (task >= args_.tasks) {
        if (lane_number() == 0) shared_.block = -1, shared_.queries_full.arrive();
        return;
      }
      load_queries(task);
      if (lane_number() == 0) task = static_cast<std::int32_t>(gridDim.x) + atomicAdd(args_.next_task, 1);
      load_keys();
      task = __shfl_sync(0xffffffffu, task, 0);
    }
  }

 private:
  static constexpr int kPanels = kDepth / 16;

  __device__ __forceinline__ void load_queries(std::int32_t task) {
    const auto at = place_of_task(args_, task);
    b_ = at.head / args_.heads, h_ = at.head % args_.heads, block_ = at.part;
    const auto lane = static_cast<int>(lane_number());
    if (lane == 0) {
      shared_.b = b_, shared_.h = h_, shared_.block = block_;
      shared_.queries_full.arrive_and_expect(sizeof(shared_.q));
    }
    __syncwarp();
    if (const int half = lane / kPanels, panel = lane % kPanels; half < 2)
      copy_box(shared_.q[half] + panel * 64 * 16, &args_.q_map, panel * 16, block_ * 128 + half * 64, 0, h_, b_,
               shared_.queries_full);
  }

  __device__ __forceinline__ void load_keys() {
    const auto& list = group_of(args_, b_, h_).keys_of_query_block;
    MergedRuns<1, 1> runs;
    runs.open(list, block_, args_.query_blocks);
    for (;;) {
      std::int32_t found[1];
      const auto block = runs.find(found);
      if (block < 0) break;
      const auto n = __shfl_sync(0xffffffffu, found[0], 0);
      const Word* const words = n >= runs.hidden ? nullptr
                                : n < 0          ? args_.words + std::int64_t{~n} * 128
                                                 : list.words + std::int64_t{n} * 128;
      const Word seen = words ? seen_by_any(words) | ~rules::low_bits(args_.key_grid.size[2] - block * 64)
                              : rules::all_bits;  // keys that do not exist are loaded as zeros
      for (int first = block * 64; first < block * 64 + 64 && first < args_.key_grid.size[2]; first += 32) {
        const auto unseen = [&](int row) { return ~static_cast<unsigned>(seen >> row % 64) & 0xffff; };
        const bool begins = first == block * 64;
        load(
            args_.k_map, first, unseen(first),
            [&](Barrier& full) {
              if (!begins) return;
              shared_.key_block[blocks_ % Shared::kKnown] = 2 * block + (words ? 1 : 0);
              if (words) copy_bytes(shared_.words[blocks_ % Shared::kKnown], words, 1024, full);
            },
            words && begins ? 1024 : 0);
        load(args_.k_map, first + 16, unseen(first + 16));
        load(args_.v_map, first, unseen(first));
        load(args_.v_map, first + 16, unseen(first + 16));
      }
      ++blocks_;
    }
    shared_.empty[at_.stage].wait(at_.phase ^ 1);
    if (lane_number() == 0) shared_.key_block[blocks_ % Shared::kKnown] = -1;
    shared_.full[at_.stage].arrive_for_warp();
    at_.advance(), ++blocks_;
  }

  /// The entries of a key block that a query of the query block sees.
  __device__ __forceinline__ static Word seen_by_any(const Word* words) {
    Word seen = 0;
#pragma unroll
    for (unsigned n = 0; n < 128; n += 32) seen |= words[n + lane_number()];
    const auto low = __reduce_or_sync(0xffffffffu, static_cast<std::uint32_t>(seen));
    return Word{__reduce_or_sync(0xffffffffu, static_cast<std::uint32_t>(seen >> 32))} << 32 | low;
  }

  struct Nothing {
    __device__ __forceinline__ void operator()(Barrier&) const {}
  };
  /// Loads 16 rows. Rows that no query of the block sees become 0, since they may hold NaN. too: further loads by the
  /// first lane, of so many more bytes.
  template <class Too = Nothing>
  __device__ __forceinline__ void load(const CUtensorMap& map, int row, unsigned unseen, const Too& too = Too(),
                                       int more = 0) {
    const auto lane = lane_number();
    auto* const rows = shared_.rows[at_.stage];
    auto& full = shared_.full[at_.stage];
    auto& copied = unseen == 0 ? full : shared_.copied;
    shared_.empty[at_.stage].wait(at_.phase ^ 1);
    if (lane == 0) too(copied);
    copied.arrive_and_expect_for_warp(16 * kDepth * 8 + more);
    __syncwarp();
    if (lane < kPanels) copy_box(rows + lane * 256, &map, lane * 16, row, 0, h_ / args_.group_heads, b_, copied);
    if (unseen != 0) {
      copied.wait(cleared_++ % 2);
      for (; unseen != 0; unseen &= unseen - 1)
        for (unsigned n = lane; n < kPanels * 8; n += 32)
          *reinterpret_cast<double2*>(rows + n / 8 * 256 + (__ffs(unseen) - 1) * 16 + n % 8 * 2) = make_double2(0, 0);
      fence_proxy_async();  // TMA writes here again later
      __syncwarp();
      full.arrive_for_warp();
    }
    at_.advance();
  }

  const DoubleForwardArgs& args_;
  Shared& shared_;
  std::int32_t b_, h_, block_;
  unsigned blocks_ = 0, cleared_ = 0;
  PipelineState<Shared::kStages> at_;
};

template <class E, int depth>  // E: float64, a parameter so that other GPUs' builds compile no code for it
class DoubleForwardBlock {
 public:
  using Shared = DoubleForwardShared<depth>;
  static constexpr int kDepth = depth, kPanels = kDepth / 16;
  static constexpr int kThreads = 3 * 128, kRegisters = 240, kLoaderRegisters = 24;

  __device__ __forceinline__ DoubleForwardBlock(const DoubleForwardArgs& args, Shared& shared)
      : args_(args), shared_(shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) shared_.begin();
    __syncthreads();
    if (threadIdx.x >= 256) {
      setmaxnreg_dec<kLoaderRegisters>();
      if (threadIdx.x < 256 + 32) DoubleForwardLoader<kDepth>(args_, shared_).run();
    } else {
      setmaxnreg_inc<kRegisters>();
      for (unsigned n = 0;; ++n) {
        shared_.queries_full.wait(n % 2);
        if (shared_.block < 0) break;
        attend();
        b_ = shared_.b, h_ = shared_.h, block_ = shared_.block;
        release(shared_.queries_empty);
        store();
      }
    }
  }

 private:
  using Scores = E[4][2][2];

  __device__ __forceinline__ static unsigned group() { return threadIdx.x / 128; }

  // --- The walk over the keys ----------------------------------------------------------------------------------------

  __device__ __forceinline__ void attend() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shift_[r] = largest_[r] = -infinity<E>(), sum_[r] = 0;
      limit_[r] = ordered(__double2hiint(shift_[r])) + 1;
    }
    sees_ = 0;
    clear_fragments(o_);
    for (;; ++blocks_) {
      shared_.full[at_.stage].wait(at_.phase);
      const auto key_block = shared_.key_block[blocks_ % Shared::kKnown];
      if (key_block < 0) break;
      const Word* const words =
          key_block % 2 ? shared_.words[blocks_ % Shared::kKnown] + group() * 64 + own_row() : nullptr;
#pragma unroll 1
      for (int first = 0; first < 64 && key_block / 2 * 64 + first < args_.key_grid.size[2]; first += 32)
        visit(words, first);
    }
    release(shared_.empty[at_.stage]);
    at_.advance(), ++blocks_;
  }

  /// 32 keys. words: of this lane's rows, null: they see all; first: the first bit of the words.
  __device__ __forceinline__ void visit(const Word* words, int first) {
    if (!sees_any(words, first)) return pass();
    Scores s;
    score_products(s);
    note_not_finite(s, words, first);
    if (words) hide(s, words, first, -infinity<E>());
    follow(s);
    softmax_step(s);
    if (words) hide(s, words, first, 0);  // 0 already; better registers: 2 to 6 % faster
    count(s);
    value_products(s, 0);
    value_products(s, 2);
  }

  __device__ __forceinline__ bool sees_any(const Word* words, int first) {
    unsigned sees = 3;
    if (words) {
      sees = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (seen_of(words, r, first)) sees |= 1u << r;
    }
    sees_ |= sees;
    return __any_sync(0xffffffffu, sees != 0);
  }
  __device__ __forceinline__ static std::uint32_t seen_of(const Word* words, int r, int first) {
    return static_cast<std::uint32_t>(words[8 * r] >> first);
  }
  /// 32 keys that none of the warp's rows sees.
  __device__ __forceinline__ void pass() {
#pragma unroll 1
    for (int n = 0; n < 4; ++n) {
      wait();  // so that it is not released twice before others release it once
      leave();
    }
  }
  __device__ __forceinline__ void wait() { shared_.full[at_.stage].wait(at_.phase); }
  __device__ __forceinline__ void leave() {
    release(shared_.empty[at_.stage]);
    at_.advance();
  }

  __device__ __forceinline__ void score_products(Scores& s) {
    const E* const first = shared_.rows[at_.stage];
    auto& first_empty = shared_.empty[at_.stage];
    wait();
    at_.advance();
    wait();
    row_products<kPanels, kPanels>(s, shared_.q[group()], first, shared_.rows[at_.stage]);
    release(first_empty);
    leave();
  }

  /// O += P V, of 16 keys. tile: the first of their two tiles of P.
  __device__ __forceinline__ void value_products(const Scores& p, int tile) {
    wait();
    const E* const rows = shared_.rows[at_.stage];
    const unsigned channel = lane_number() / 4;
    unsigned at[2][2];  // this lane's key and channel: by the keys' parity, and of even or odd tiles of channels
#pragma unroll
    for (unsigned e = 0; e < 2; ++e) {
      at[e][0] = column_in(e) * 128 + (channel / 2 ^ column_in(e)) * 16 + channel % 2 * 8;
      at[e][1] = at[e][0] ^ 64;
    }
    E a[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) a[n] = p[tile + n / 4][n % 2][n / 2 % 2];
#pragma unroll
    for (int j = 0; j < kDepth / 8; ++j) {
      E b[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) b[n] = number_at(rows, at[n % 2][j % 2] + n / 2 * 1024 + j / 2 * 16 * 128);
      multiply_64(o_[j][0], o_[j][1], a, b);
    }
    leave();
  }

  /// Numbers of pairs that the mask hides become x.
  __device__ __forceinline__ static void hide(Scores& s, const Word* words, int first, E x) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto seen = seen_of(words, r, first);
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (!(seen >> (8 * j + column_in(e)) & 1)) s[j][r][e] = x;
    }
  }

  /// Reports non-finite scores. Exponentials need finite scores, except in rows that see none of the keys.
  __device__ __forceinline__ void note_not_finite(const Scores& s, const Word* words, int first) {
    int most = 0;
#pragma unroll
    for (int n = 0; n < 16; ++n) most = max(most, __double2hiint(s[n / 4][n / 2 % 2][n % 2]) & 0x7fffffff);
    if (most < 0x7ff00000) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (words && seen_of(words, r, first) == 0) continue;
#pragma unroll
      for (int n = 0; n < 8; ++n)
        if ((__double2hiint(s[n / 2][r][n % 2]) & 0x7fffffff) >= 0x7ff00000) *args_.not_finite = 1;
    }
  }

  /// Turns scores into P, except for hidden ones.
  __device__ __forceinline__ void softmax_step(Scores& s) const {
    // A row without any score above -inf yet: -inf - 0.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const E shift = shift_[r] == -infinity<E>() ? 0 : shift_[r];
#pragma unroll
      for (int n = 0; n < 8; ++n) s[n / 2][r][n % 2] -= shift;
    }
    take_exponentials<16>([&](int n) -> E& { return s[n / 4][n / 2 % 2][n % 2]; }, args_.exponential, table_);
  }
  /// Adds P to the rows' sums. A tile's numbers are summed first: long sums of small numbers then lose less accuracy.
  __device__ __forceinline__ void count(const Scores& p) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      E sum[2] = {p[0][r][0], p[0][r][1]};
#pragma unroll
      for (int n = 2; n < 8; ++n) sum[n % 2] += p[n / 2][r][n % 2];
      sum_[r] += sum[0] + sum[1];
    }
  }

  /// Maps a number's upper half to an integer in the same order.
  __device__ __forceinline__ static int ordered(int upper) { return upper ^ (upper >> 31 & 0x7fffffff); }

  /// Raises the rows' shifts to follow their scores, and rescales O and the sums. The upper halves of numbers show
  /// whether that is needed: float64 comparisons would take the tensor cores' time.
  __device__ __forceinline__ void follow(const Scores& s) {
    bool high = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int most = ordered(__double2hiint(s[0][r][0]));
#pragma unroll
      for (int n = 1; n < 8; ++n) most = max(most, ordered(__double2hiint(s[n / 2][r][n % 2])));
      high |= most >= limit_[r];
    }
    if (__any_sync(0xffffffffu, high)) raise(s);
    if (!wants_largest()) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) largest_[r] = larger_of(largest_[r], largest_of(s, r));
  }
  __device__ __forceinline__ bool wants_largest() const { return args_.row_max.data || args_.row_sum.data; }
  __device__ __forceinline__ static E largest_of(const Scores& s, int r) {
    E x = s[0][r][0];
#pragma unroll
    for (int n = 1; n < 8; ++n) x = larger_of(x, s[n / 2][r][n % 2]);
    return x;
  }
  __device__ __forceinline__ void raise(const Scores& s) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const E tile = quad_largest(largest_of(s, r));
      const bool rise = tile > shift_[r] + args_.lag;
      const E factor = rise && shift_[r] != -infinity<E>() ? exp((shift_[r] - tile) * args_.scale) : E(1);
      if (rise) shift_[r] = tile, limit_[r] = ordered(__double2hiint(tile + args_.lag));
      sum_[r] *= factor;
#pragma unroll
      for (int n = 0; n < 4 * kPanels; ++n) o_[n / 2][r][n % 2] *= factor;
    }
  }

  // --- The end of a task ---------------------------------------------------------------------------------------------

  /// The epilogue: the sink, the division, the statistics that the caller asked for.
  __device__ __forceinline__ void store() {
    const int rows[2] = {static_cast<int>(group() * 64 + own_row()), static_cast<int>(group() * 64 + own_row() + 8)};
    E zero = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      E sum = quad_sum(sum_[r]), top = rounded_product(shift_[r], args_.scale), change = 1;
      if (args_.sink.data && sees_ >> r & 1) {
        const E sink = read_number<E>(args_.sink, h_ * args_.sink.head), together = larger_of(top, sink);
        if (together != -infinity<E>() || sink != sink) {
          change = exp(top - together);
          sum = sum * change + exp(sink - together);
          top = together;
        }
      }
      zero += 0 * sum;
      divide(r, change, sum);
      store_statistics(rows[r], r, top, sum);
    }
    if (zero != zero) *args_.not_finite = 1;
    store_rows(rows);
  }

  /// Stores this lane's two rows of O, by their numbers in the block.
  __device__ __forceinline__ void store_rows(const int (&rows)[2]) const {
    const auto& to = args_.out;
    E* const data = reinterpret_cast<E*>(to.data) + b_ * to.batch + h_ * to.head;
    E zero = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < kDepth / 8; ++j) zero += 0 * o_[j][r][0] + 0 * o_[j][r][1];
      const auto query = block_ * 128 + rows[r];
      if (query >= args_.query_grid.size[2]) continue;
#pragma unroll
      for (int j = 0; j < kDepth / 8; ++j) {
        const int channel = 8 * j + 2 * static_cast<int>(lane_number() % 4);
        E* const at = data + query * to.sequence[2] + channel * to.channel;
        if (to.vectors && channel + 1 < args_.d_v) {
          *reinterpret_cast<double2*>(at) = make_double2(o_[j][r][0], o_[j][r][1]);
        } else {
          if (channel < args_.d_v) at[0] = o_[j][r][0];
          if (channel + 1 < args_.d_v) at[to.channel] = o_[j][r][1];
        }
      }
    }
    if (zero != zero) *args_.not_finite = 1;
  }

  /// Row r of O times a factor, divided by its sum: a quotient by the reciprocal, with a correction.
  __device__ __forceinline__ void divide(int r, E factor, E sum) {
    const E inverse = sum == 0 ? 0 : E(1) / sum;
#pragma unroll
    for (int n = 0; n < 4 * kPanels; ++n) {
      E& x = o_[n / 2][r][n % 2];
      const E whole = x * factor, quotient = whole * inverse;
      x = fma(fma(-quotient, sum, whole), inverse, quotient);
    }
  }

  __device__ __forceinline__ void store_statistics(int row, int r, E top, E sum) const {
    E largest = quad_largest(largest_[r]);  // by all lanes
    if (lane_number() % 4 != 0 || !args_.wants_statistics()) return;
    const auto& grid = args_.query_grid;
    const auto c = entry_of(box_of(grid, true, block_), row);
    if (!rules::inside(c, grid.size)) return;
    const auto at = rules::flat_index(c, grid.size);
    const auto store = [&](const Numbers& to, E x) {
      if (to.data) reinterpret_cast<E*>(to.data)[b_ * to.batch + h_ * to.head + at * to.query] = x;
    };
    const bool empty = sum == 0;  // it sees no key, or only keys with a score of -inf, and has no sink above that
    store(args_.lse, empty ? -infinity<E>() : top + log(sum));
    if (!wants_largest()) return;
    largest = rounded_product(largest, args_.scale);
    if (args_.sink.data && sees_ >> r & 1)
      largest = larger_of(largest, read_number<E>(args_.sink, h_ * args_.sink.head));
    store(args_.row_max, empty ? -infinity<E>() : largest);
    store(args_.row_sum, empty || top == largest ? sum : sum * exp(top - largest));
  }

  const DoubleForwardArgs& args_;
  Shared& shared_;
  const PowersOfTwo table_;
  std::int32_t b_, h_, block_;
  PipelineState<Shared::kStages> at_;
  unsigned blocks_ = 0;
  E shift_[2], largest_[2], sum_[2];  // largest_ and sum_ are over this lane's keys only
  int limit_[2];                      // the upper half of scores from which on a row's shift may have to rise
  unsigned sees_;                     // bit r: row r sees a key
  E o_[kDepth / 8][2][2];
};

}  // namespace anyflash::cuda
