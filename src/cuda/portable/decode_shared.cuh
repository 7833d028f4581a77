// Shared memory, tasks and key walks of the decode kernels, and functions that are called rather than inlined because
// they are rarely needed.
#pragma once

#include "cuda/portable/decode_args.h"
#include "cuda/portable/decode_tuning.h"
#include "cuda/portable/not_finite.cuh"
#include "cuda/portable/products.cuh"
#include "cuda/portable/rows.cuh"
#include "cuda/portable/scores.cuh"
#include "cuda/portable/softmax.cuh"
#include "cuda/portable/walk.cuh"
#include "rules/coordinates.h"
#include "rules/words.h"

namespace anyflash::cuda {

/// Some rows of one key head, a part of the keys, some channels of the values.
struct DecodeTask {
  std::int32_t b, head, part, first_row, first_value;  // head: a key head

  DecodeTask() = default;
  __device__ __forceinline__ DecodeTask(const DecodeArgs& args, std::int32_t task, int rows, int values) {
    first_value = task % args.call.value_parts * values;
    task /= args.call.value_parts;
    first_row = task % args.row_parts * rows;
    task /= args.row_parts;
    part = task % args.parts;
    task /= args.parts;
    const auto heads = args.call.heads / args.call.group_heads;
    b = task / heads, head = task % heads;
  }
  /// The query head and the query of a row.
  __device__ __forceinline__ std::int32_t query_head(const DecodeArgs& args, int row) const {
    return head * args.call.group_heads + (first_row + row) / args.queries;
  }
  __device__ __forceinline__ std::int32_t query(const DecodeArgs& args, int row) const {
    return (first_row + row) % args.queries;
  }
  __device__ __forceinline__ bool exists(const DecodeArgs& args, int row) const { return first_row + row < args.rows; }
  /// The index of a row's partial result.
  __device__ __forceinline__ std::int64_t place(const DecodeArgs& args, int row) const {
    const auto heads = args.call.heads / args.call.group_heads;
    return ((std::int64_t{b} * heads + head) * args.parts + part) * args.rows + first_row + row;
  }
};

/// A stage's tile: keys from `first` on. Also the mask words of a partial block, as find_few_words takes them, or the
/// block's number of keys (by_length).
struct DecodeTile {
  std::int32_t first, words;
  bool exists, partial;
  bool last;  // the warp's last tile in its task
};

template <class E, class Sizes>
struct DecodeShared {
  using Products = typename ProductsOf<E>::type;
  using T = typename Products::Number;
  using QueryTile = typename Products::template KeyTile<Sizes::kRows, Sizes::kDepth>;
  using KeyTile = typename Products::template KeyTile<Sizes::kKeys, Sizes::kDepth>;
  using ValueTile = typename Products::template ValueTile<Sizes::kKeys, Sizes::kDepth>;
  struct Stage {
    alignas(16) E k[KeyTile::kSize];
    alignas(16) E v[ValueTile::kSize];
  };
  /// A warp's results of at most two slots, in a free stage.
  static constexpr int kJoinSlots = Sizes::kRowGroups < 2 ? Sizes::kRowGroups : 2, kJoinRows = 8 * kJoinSlots;
  using Results = T[kJoinRows][Sizes::kDepth + 8];  // padded so that neighbouring rows use different banks

  alignas(16) E q[QueryTile::kSize];
  alignas(16) Stage stages[Sizes::kWarps][Sizes::kStages];
  DecodeTile tiles[Sizes::kWarps][Sizes::kStages];
  rules::Word words[Sizes::kWarps][Sizes::kRows];  // of a partial key block
  T largest[Sizes::kWarps][Sizes::kRows], sum[Sizes::kWarps][Sizes::kRows], weight[Sizes::kWarps][Sizes::kRows];
  bool seen[Sizes::kWarps][Sizes::kRows];
  std::int32_t free[Sizes::kWarps];  // the stage where a warp's results are
  DeviceRun runs[Sizes::kWarps];     // of a task with by_length
  static_assert(sizeof(Results) <= sizeof(Stage) && Sizes::kRowGroups % kJoinSlots == 0);
};

/// A warp's steps along the key blocks of a part: every kWarps-th visited block.
template <int kWarps>
struct BlockWalk {
  const DeviceRun* run;
  std::int32_t runs, blocks;  // runs left after this one; blocks left in the part, including this one
  std::int32_t block, left, words;
  rules::TileClass kind;

  BlockWalk() = default;
  /// Consecutive full blocks.
  __device__ __forceinline__ BlockWalk(std::int32_t first, std::int32_t count)
      : run(nullptr), runs(0), blocks(count), block(first), left(count), words(-1), kind(rules::TileClass::full) {}
  /// skip: visited blocks before the part; count: blocks of the part.
  __device__ __forceinline__ BlockWalk(const DeviceRun* first, std::int32_t run_count, std::int32_t skip,
                                       std::int32_t count, int warp)
      : run(first), runs(run_count), blocks(count), block(0), left(0) {
    const int lane = static_cast<int>(lane_number());
    while (skip > 0 && runs > 0) {  // 32 runs at once
      const std::int32_t own = lane < runs ? run[lane].count : 0;
      std::int32_t end = own;
#pragma unroll
      for (int n = 1; n < 32; n *= 2) {
        const auto before = __shfl_up_sync(0xffffffffu, end, n);
        if (lane >= n) end += before;
      }
      const auto beyond = __ballot_sync(0xffffffffu, end > skip);
      const int at = beyond ? __ffs(static_cast<int>(beyond)) - 1 : 31;
      skip -= __shfl_sync(0xffffffffu, beyond ? end - own : end, at);
      run += beyond ? at : 32, runs -= beyond ? at : 32;
      if (beyond) break;
    }
    open();
    block += skip, left -= skip;
    advance(warp);
  }
  __device__ __forceinline__ bool more() const { return left > 0 && blocks > 0; }
  __device__ __forceinline__ bool partial() const { return kind != rules::TileClass::full; }
  __device__ __forceinline__ void step() { advance(kWarps); }

 private:
  __device__ __forceinline__ void open() {
    left = 0;
    if (runs <= 0) return;
    const DeviceRun next = *run++;
    --runs;
    block = next.first, left = next.count, kind = next.kind, words = next.words;
  }
  __device__ __forceinline__ void advance(int n) {
    blocks -= n;
    while (n >= left && left > 0) n -= left, open();
    block += n, left -= n;
  }
};

// Most of what follows is called, not inlined. No member of the thread block's object is passed by address: the
// compiler would then keep the whole object, with the sums, in local memory.

/// Turns a lane's products into scores. first_key: of the tile.
template <class T, int kRowGroups, int kNumbers>
__device__ __noinline__ void finish_few_scores(const DecodeArgs& args, DecodeTask task, int first_key,
                                               T (&s)[kRowGroups][kNumbers]) {
  const auto& program = *group_of(args.call, task.b, 0).program;
#pragma unroll 1
  for (int i = 0; i < kRowGroups; ++i) {
    const int row = 8 * i + static_cast<int>(lane_number() / 4);
    if (!task.exists(args, row)) continue;
    const ScoreTerms<T> terms(args.call, task.b, task.query_head(args, row));
    const auto query = task.query(args, row);
    const auto x = rules::query_coordinate(program, {{0, 0, query}});
#pragma unroll 1
    for (int n = 0; n < kNumbers; ++n) {
      const int key = first_key + 8 * (n / 2) + 2 * static_cast<int>(lane_number() % 4) + n % 2;
      if (key >= program.axis[2].k_size) continue;
      const auto y = rules::key_coordinate(program, {{0, 0, key}});
      const auto gap = [&](int axis) { return static_cast<T>(x[axis] - y[axis]); };
      T derivative;
      s[i][n] = terms.finish(s[i][n], query * args.call.bias.query, key * args.call.bias.key, gap, derivative);
    }
  }
}

/// Writes the mask words of some rows of a key block to shared memory, by one warp. tile: the index of its words in the
/// table; negative: the mask program is evaluated.
static __device__ __noinline__ void find_few_words(const DecodeArgs& args, DecodeTask task, int rows,
                                                   std::int32_t block, std::int32_t tile, rules::Word* to) {
  const int row = static_cast<int>(lane_number());
  if (row >= rows) return;
  rules::Word word = 0;
  if (task.exists(args, row)) {
    const auto& group = group_of(args.call, task.b, 0);
    const auto query = task.query(args, row);
    word = tile >= 0 ? group.keys_of_query_block.words[std::int64_t{tile} * args.call.query_grid.extent[2] + query]
                     : rules::word(*group.program, {{0, 0, query}}, box_of(args.call.key_grid, true, block));
  }
  to[row] = word;
}

/// The offset of row `key` of a head, in elements from the tensor's beginning.
__device__ __forceinline__ std::int64_t key_at(const ForwardArgs& call, const DecodeTask& task, const Rows& rows,
                                               int key) {
  const auto head = task.head * rows.head;
  if (!call.paged) return task.b * rows.batch + head + key * rows.sequence[2];
  const auto page = call.pages.at(task.b, key / call.pages.page_size);
  return page * rows.batch + head + key % call.pages.page_size * rows.sequence[2];
}

/// The number of keys of a batch entry.
__device__ __forceinline__ std::int32_t decode_keys(const DecodeArgs& args, std::int32_t b) {
  if (args.length_in_mask) return group_of(args.call, b, 0).program->axis[2].k_size;
  if (!args.lengths.data) return args.keys;
  const auto length = args.lengths.at(b);
  return static_cast<std::int32_t>(length < 0 ? 0 : length < args.keys ? length : args.keys);
}

/// Where the visited blocks are in a row: the keys of a task's part.
struct DecodeSpan {
  std::int32_t first, end;
};
__device__ __forceinline__ DecodeSpan span_of(const DecodeArgs& args, const DecodeTask& task) {
  const auto size = decode_keys(args, task.b);
  const auto end = args.by_length ? (size + 63) / 64 : args.end_block;
  const auto first = args.first_block + task.part * args.part_blocks;
  const auto last = task.part == args.parts - 1 ? end : min(end, first + args.part_blocks);
  return {first * 64, min(last * 64, size)};
}

/// In plain calls: which of kKeys keys from `key` on are visible? All bits if all are. size: keys of the batch entry.
template <int kKeys>
__device__ __forceinline__ rules::Word word_of_keys(const DecodeArgs& args, int key, int size) {
  rules::Word word = rules::all_bits;
  if (args.by_length) {
    if (size - key < kKeys) word = rules::low_bits(size - key);
  } else {
#pragma unroll
    for (int n = 0; n < DecodeArgs::partial_blocks; ++n)
      if (key / 64 == args.partial[n]) word = args.words[n] >> (key % 64) & rules::low_bits(kKeys);
  }
  return word;
}

/// The key blocks of a task's part, one after the other. size: keys of the batch entry. in_memory: read from runs.
__device__ __forceinline__ BlockWalk<1> walk_of_task(const DecodeArgs& args, const DecodeTask& task, int size,
                                                     bool in_memory) {
  if (!in_memory) {
    const auto span = span_of(args, task);
    return {span.first / 64, (span.end - span.first + 63) / 64};
  }
  const auto& list = group_of(args.call, task.b, 0).keys_of_query_block;
  return {list.runs + list.start[0], static_cast<std::int32_t>(list.start[1] - list.start[0]),
          task.part * args.part_blocks, task.part == args.parts - 1 ? 0x7fffffff : args.part_blocks, 0};
}
/// Are some of the block's keys hidden from some rows? word: of word_of_keys().
__device__ __forceinline__ bool is_partial(const BlockWalk<1>& at, rules::Word word, bool in_memory) {
  return at.more() && (in_memory ? at.partial() : word != rules::all_bits);
}
/// Writes the mask words of a task's rows from `first` on for that block, by one warp.
template <int kRows>
__device__ __forceinline__ void find_words_of_rows(const DecodeArgs& args, DecodeTask task, int first,
                                                   const BlockWalk<1>& at, rules::Word word, rules::Word* to) {
  if (!args.masked) {
    if (lane_number() < kRows) to[lane_number()] = word;
    return;
  }
  task.first_row += first;
  find_few_words(args, task, kRows, at.block, at.words, to);
}

/// Copies the rows of Q, for all heads that share a key head, to their tile, by all threads. Rows and channels that do
/// not exist become 0. It uses ordinary loads: asynchronous copies would have to be waited for behind those of keys.
template <class Tile, int kRows, int kDepth, int kThreads, class E>
__device__ __noinline__ void load_few_queries(const DecodeArgs& args, DecodeTask task, E* to) {
  constexpr int kNumbers = 16 / sizeof(E), kChunks = kDepth / kNumbers;
  const auto& rows = args.call.q;
  const int channels = args.call.d_qk;
  const E* const data = reinterpret_cast<const E*>(rows.data) + task.b * rows.batch;
  const auto row_at = [&](int row) {
    return task.query_head(args, row) * rows.head + task.query(args, row) * rows.sequence[2];
  };
  if (rows.vectors && channels % kNumbers == 0) {
#pragma unroll 2
    for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads) {
      const int row = i / kChunks, channel = i % kChunks * kNumbers;
      uint4 x = {0, 0, 0, 0};
      if (task.exists(args, row) && channel < channels)
        x = *reinterpret_cast<const uint4*>(data + row_at(row) + channel);
      *reinterpret_cast<uint4*>(to + Tile::at(row, channel)) = x;
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * kDepth; i += kThreads) {
    const int row = i / kDepth, channel = i % kDepth;
    const bool exists = task.exists(args, row) && channel < channels;
    to[Tile::at(row, channel)] = exists ? data[row_at(row) + channel * rows.channel] : zero<E>();
  }
}

/// Copies keys or values from `first` on to a tile, by one warp, with any strides and pages. Rows and channels that do
/// not exist become 0.
template <class Tile, int kKeys, int kDepth, class E>
__device__ __noinline__ void bring_any_rows(const ForwardArgs& call, const Rows& rows, DecodeTask task, E* to,
                                            int first_channel, int channels, int first, int size) {
  constexpr int kThreads = 32;
  const int thread = static_cast<int>(lane_number());
  constexpr int kNumbers = 16 / sizeof(E), kChunks = kDepth / kNumbers;
  const E* const data = reinterpret_cast<const E*>(rows.data) + first_channel * rows.channel;
  if (rows.vectors) {
#pragma unroll 1
    for (int i = thread; i < kKeys * kChunks; i += kThreads) {
      const int key = first + i / kChunks, channel = i % kChunks * kNumbers;
      const int wanted = key < size ? min(max(channels - channel, 0), kNumbers) : 0;
      copy_16(to + Tile::at(i / kChunks, channel), wanted > 0 ? data + key_at(call, task, rows, key) + channel : data,
              wanted * static_cast<int>(sizeof(E)));
    }
    return;
  }
  const bool along_rows = rows.channel != 1 && rows.sequence[2] == 1;  // neighbouring lanes read neighbouring elements
#pragma unroll 1
  for (int i = thread; i < kKeys * kDepth; i += kThreads) {
    const int row = along_rows ? i % kKeys : i / kDepth, channel = along_rows ? i / kKeys : i % kDepth;
    const bool exists = first + row < size && channel < channels;
    to[Tile::at(row, channel)] =
        exists ? data[key_at(call, task, rows, first + row) + channel * rows.channel] : zero<E>();
  }
}

/// The factor of a warp's or part's results of a row where they are added. 0 if no key is visible there, in which case
/// the results may be uninitialised. -0 if keys are visible but their share underflows: a NaN or an infinity of theirs
/// must then still show.
template <class T>
__device__ __forceinline__ T joined_weight(T share, T sum, T factor, bool seen) {
  if (!seen) return 0;
  const T weight = (share != T(0) ? share / sum : T(0)) * factor;
  return weight == T(0) ? -T(0) : weight;
}
template <class T>
__device__ __forceinline__ bool counts(T joined) {
  return joined != T(0) || signbit(joined);
}

/// The final numbers of a row: with the sink, and with the statistics that the caller asked for.
template <class T>
struct FinishedRow {
  T factor;    ///< for results already divided by the sum of the keys' exponentials
  bool empty;  ///< it sees no key, or only keys with a score of -inf, and has no sink above that

  /// largest: of the products; `scale` turns it into a score.
  __device__ __forceinline__ FinishedRow(const DecodeArgs& args, std::int32_t b, std::int32_t h, std::int32_t query,
                                         T largest, T scale, T sum, bool seen, bool store) {
    const auto& call = args.call;
    factor = 1;
    largest *= scale;
    if (call.sink.data && (sum != T(0) || seen)) {
      const T sink = read_number<T>(call.sink, h * call.sink.head), together = fmax(largest, sink);
      if (together != -infinity() || sink != sink) {
        const T change = exp(largest - together), with = sum * change + exp(sink - together);
        factor = sum == T(0) && with == with ? T(0) : sum * change / with;
        sum = with, largest = together;
      }
    }
    empty = sum == T(0);
    if (sum != sum && largest != infinity()) largest = sum;  // a NaN among the scores, which comparisons ignore
    if (!store) return;
    const auto put = [&](const Numbers& to, T x) {
      if (to.data) reinterpret_cast<T*>(to.data)[b * to.batch + h * to.head + query * to.query] = x;
    };
    put(call.row_max, empty ? -infinity() : largest);
    put(call.row_sum, sum);
    put(call.lse, empty ? -infinity() : largest + log(sum));
  }

  __device__ __forceinline__ static T infinity() {
    return sizeof(T) == 8 ? static_cast<T>(__longlong_as_double(0x7ff0000000000000ll))
                          : static_cast<T>(__int_as_float(0x7f800000));
  }
};

}  // namespace anyflash::cuda
