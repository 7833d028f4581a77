// The forward pass for few queries, as in decoding ("Flash-Decoding", Dao et al. 2023), from sm_75 up.
//
// The queries of all heads that share a key head are the rows of one block of threads, so K and V are read once for
// them; the key blocks that they visit are cut into parts, each the work of a block of threads. Inside, every group of
// kRowWarps warps works alone: it takes kKeys keys at a time, brings them to tiles of its own some steps ahead, and
// keeps O, the largest product and the sum of all rows. What the groups leave is joined in shared memory, what the parts
// leave in global memory by a second kernel. Where a part begins does not depend on the batch, and joins go in one order, so
// neither do the bits. Bound by reading K and V.
//
// Results are divided by their sums wherever they are joined, so that nothing large is added up. A group whose result is
// not finite goes over its keys again: with care for hidden values (not_finite.cuh), and then, for values near the end
// of their type, with P that sums to a half in the rows whose sums of P V have overflowed.
#pragma once

#include "cuda/portable/decode_shared.cuh"

namespace anyflash::cuda {

template <class E, class Sizes>
class DecodeBlock {
 public:
  using Shared = DecodeShared<E, Sizes>;
  using Products = typename Shared::Products;
  using T = typename Shared::T;
  using Stage = typename Shared::Stage;
  static constexpr int kSlots = Sizes::kSlots, kKeys = Sizes::kKeys, kKeyTiles = kKeys / 8, kDepth = Sizes::kDepth;
  static constexpr int kValueTiles = kDepth / 8, kRows = Sizes::kRows, kGroups = Sizes::kGroups;
  static constexpr int kRowWarps = Sizes::kRowWarps, kStages = Sizes::kStages, kTiles = 64 / kKeys;
  using Walk = BlockWalk<kGroups>;

  __device__ __forceinline__ DecodeBlock(const DecodeArgs& args, Shared& shared)
      : args_(args), call_(args.call), shared_(shared), task_(args, kRows, kDepth),
        group_(threadIdx.x / (32 * kRowWarps)), first_row_(threadIdx.x / 32 % kRowWarps * (8 * kSlots)),
        mask_(group_of(args.call, task_.b, 0)), size_(mask_.program->axis[2].k_size) {}

  __device__ __forceinline__ void run() {
    const E* const queries = reinterpret_cast<const E*>(call_.q.data) + task_.b * call_.q.batch;
    load_any_rows<typename Shared::QueryTile, kRows, kDepth, Sizes::kThreads>(
        shared_.q, Source<E>{call_.q, queries, call_.d_qk}, DecodeQueries{args_, task_});
    copies_commit();
    if (!attend(Known<false>(), false)) {
      bool halved = false;
      while (!attend(Known<true>(), halved) && !halved) halved = true;
    }
    join();
  }

 private:
  /// Steps along the tiles of the group's key blocks, kTiles each.
  struct Steps {
    Walk walk;
    int tile = 0;
    const E *k, *v;  // the block's first row, where rows follow one another

    __device__ __forceinline__ bool more() const { return walk.more(); }
    __device__ __forceinline__ int first() const { return walk.block * 64 + tile * kKeys; }
    __device__ __forceinline__ void step() {
      if (++tile == kTiles) tile = 0, walk.step();
    }
  };

  /// One pass over the keys, with care or without. halved: P of rows that have overflowed in the pass before, which
  /// tells their maxima and sums, sums to a half. False if the group's results are not finite.
  template <class Careful>
  __device__ __forceinline__ bool attend(Careful careful, bool halved) {
    const auto* const start = mask_.keys_of_query_block.start;
    const bool last = task_.part == args_.parts - 1;
    Steps now{Walk(mask_.keys_of_query_block.runs + start[0], static_cast<std::int32_t>(start[1] - start[0]),
                   task_.part * args_.part_blocks, last ? 0x7fffffff : args_.part_blocks, group_)};
    Steps ahead = now;
#pragma unroll 1
    for (int n = 0; n + 1 < kStages; ++n) bring(ahead, n);
    clear_rows(halved);
    if (careful) {
      wait_for_group();
    } else {  // the queries have come
      copies_wait<kStages - 1>();
      __syncthreads();
    }
    int stage = 0;
    while (now.more()) {
      if (kStages == 1) {
        wait_for_group();  // the only stage is free
        bring(ahead, 0);
        copies_wait<0>();
      } else {
        copies_wait<kStages == 1 ? 0 : kStages - 2>();
      }
      wait_for_group();  // the tile is there, the one before is free
      if (kStages > 1) bring(ahead, stage == 0 ? kStages - 1 : stage - 1);
      if (now.walk.partial() && now.tile == 0) {
        find_few_words(args_, mask_, task_, first_row_, 8 * kSlots, now.walk.block, now.walk.words,
                       shared_.words[group_]);
        __syncwarp();
      }
      take(now, shared_.stages[group_][stage], careful);
      now.step();
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    copies_wait<0>();
    wait_for_group();  // nobody reads a stage or a word any more
    bool again = !careful && !finite();
    if (careful) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) again |= overflowed(i);
    }
    return !any_of_group(again);
  }

  __device__ __forceinline__ void wait_for_group() const {
    if constexpr (kRowWarps == 1) {
      __syncwarp();
    } else {
      wait_for_threads(1 + group_, 32 * kRowWarps);
    }
  }
  __device__ __forceinline__ bool any_of_group(bool one) const {
    if constexpr (kRowWarps == 1) {
      return __any_sync(0xffffffffu, one);
    } else {
      return any_of_threads(1 + group_, 32 * kRowWarps, one);
    }
  }

  __device__ __forceinline__ void clear_rows(bool halved) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      T shift = -infinity();
      weight_[i] = 1;
      if (halved) {
        const T sum = quad_sum(sum_[i]);
        if (overflowed(i)) shift = shift_[i], weight_[i] = T(0.5) / sum;  // others keep their bits
      }
      shift_[i] = shift, sum_[i] = 0, seen_[i] = shows_[i] = false;
    }
    clear(o_);
  }

  // --- Keys and values -------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void bring(Steps& steps, int stage) {
    if (steps.more()) {
      auto& to = shared_.stages[group_][stage];
      bring_rows<typename Shared::KeyTile>(to.k, call_.k, steps.k, 0, call_.d_qk, steps);
      bring_rows<typename Shared::ValueTile>(to.v, call_.v, steps.v, task_.first_value, call_.d_v - task_.first_value,
                                             steps);
      steps.step();
    }
    copies_commit();
  }

  /// at: where the tile's rows begin, kept from one tile of a block to the next.
  template <class Tile>
  __device__ __forceinline__ void bring_rows(E* to, const Rows& rows, const E*& at, int first_channel, int channels,
                                             const Steps& steps) const {
    constexpr int kNumbers = 16 / sizeof(E), kChunks = kDepth / kNumbers, kThreads = 32 * kRowWarps;
    constexpr int kStep = kChunks < kThreads ? kThreads / kChunks : 1, kParts = kChunks / kThreads + (kStep > 1);
    static_assert(kKeys % kStep == 0 && (kChunks % kThreads == 0 || kThreads % kChunks == 0));
    const int thread = static_cast<int>(threadIdx.x) % kThreads, first = steps.first();
    const bool neighbours = first + kKeys <= size_ && (!call_.paged || call_.pages.page_size % kKeys == 0);
    if (!(rows.vectors && neighbours && call_.whole_channels)) {
      bring_any_rows<Tile, kKeys, kDepth, kThreads>(call_, rows, task_, to, first_channel, channels, first, size_,
                                                    thread);
      at = nullptr;
      return;
    }
    if (steps.tile == 0 || !at || (call_.paged && call_.pages.page_size % 64 != 0))
      at = reinterpret_cast<const E*>(rows.data) + first_channel + key_at(call_, task_, rows, first) +
           thread / kChunks * rows.sequence[2] + thread % kChunks * kNumbers;
    const auto stride = kStep * rows.sequence[2];
    const E* row = at;
#pragma unroll
    for (int m = 0; m < (kParts > 0 ? kParts : 1); ++m) {
      const int channel = thread % kChunks * kNumbers + kThreads * m * kNumbers;
      E* const place = to + Tile::at(thread / kChunks, channel);
      if (channel < channels) {
        row = at;
#pragma unroll
        for (int n = 0; n < kKeys / kStep; ++n, row += stride)
          copy_16(place + n * kStep * Tile::kStride, row + kThreads * m * kNumbers);
      } else {
#pragma unroll
        for (int n = 0; n < kKeys / kStep; ++n)
          *reinterpret_cast<uint4*>(place + n * kStep * Tile::kStride) = uint4{0, 0, 0, 0};
      }
    }
    at += (kKeys / kStep) * stride;
  }

  // --- A tile ------------------------------------------------------------------------------------------------------------

  template <class Careful>
  __device__ __forceinline__ void take(const Steps& steps, Stage& tile, Careful careful) {
    T s[kSlots][kKeyTiles][2];
    Products::template scores<kRows, kDepth>(s, own_rows(), tile.k, careful);
    if (careful && !Products::exact_infinities)
      mend_scores<Products, typename Shared::QueryTile, typename Shared::KeyTile, kDepth>(
          s, own_rows(), tile.k, rows_not_finite<typename Shared::KeyTile>(tile.k));
    if (args_.general) finish_scores(s, steps.first());
    if (steps.walk.partial()) {
      hide(s, steps.tile * kKeys);
    } else {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) seen_[i] = true;
    }
    softmax(s);
    if (careful) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i)
#pragma unroll
        for (int n = 0; n < 2 * kKeyTiles; ++n) s[i][n / 2][n % 2] *= weight_[i];
    }
    if (careful) add_hidden_values(s, tile, steps);
    Products::template values<typename Shared::ValueTile>(o_, s, tile.v, careful);
  }

  /// The rows of Q, for products that look for those of their warp behind those of the warps before it.
  __device__ __forceinline__ const E* own_rows() const {
    return shared_.q + (first_row_ - static_cast<int>(threadIdx.x / 32) * 8 * kSlots) * Shared::QueryTile::kStride;
  }
  __device__ __forceinline__ int row_of(int i) const { return first_row_ + 8 * i + static_cast<int>(lane_number() / 4); }

  __device__ __forceinline__ void finish_scores(T (&s)[kSlots][kKeyTiles][2], int first_key) const {
    T local[kSlots][2 * kKeyTiles];
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kKeyTiles; ++n) local[i][n] = s[i][n / 2][n % 2];
    finish_few_scores(args_, *mask_.program, task_, first_row_, first_key, local);
#pragma unroll
    for (int i = 0; i < kSlots; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kKeyTiles; ++n) s[i][n / 2][n % 2] = local[i][n];
  }

  __device__ __forceinline__ void hide(T (&s)[kSlots][kKeyTiles][2], int first_key) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const rules::Word whole = shared_.words[group_][row_of(i)] >> first_key, word = whole >> (2 * (lane_number() % 4));
      seen_[i] |= (whole & (~0ull >> (64 - kKeys))) != 0;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(word >> (8 * j + e) & 1)) s[i][j][e] = -infinity();
    }
  }

  /// s becomes P; the rows' sums follow.
  __device__ __forceinline__ void softmax(T (&s)[kSlots][kKeyTiles][2]) {
    T largest[kSlots];
    bool high = false;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      largest[i] = s[i][0][0];
#pragma unroll
      for (int n = 1; n < 2 * kKeyTiles; ++n) largest[i] = fmax(largest[i], s[i][n / 2][n % 2]);
      largest[i] = fmax(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 1));
      largest[i] = fmax(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], 2));
      high |= largest[i] > shift_[i];
    }
    if (__any_sync(0xffffffffu, high)) raise(largest);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const T shift = shift_[i] == -infinity() ? T(0) : shift_[i];  // exp(-inf - 0) = 0, and a NaN stays one
      T sum = 0;
#pragma unroll
      for (int n = 0; n < 2 * kKeyTiles; ++n) {
        auto& x = s[i][n / 2][n % 2];
        x = exponential(x, shift);
        sum += x;
      }
      sum_[i] += sum;
    }
  }

  /// exp((x - shift) scale). The difference comes first: the largest score's P is 1 to the bit, however large it is.
  __device__ __forceinline__ T exponential(T x, T shift) const {
    if constexpr (sizeof(E) > 2) {
      return exp((x - shift) * (sizeof(T) == 8 ? static_cast<T>(call_.unit) : call_.unit32));
    } else {
      return exp2_approximately((x - shift) * call_.unit32);
    }
  }

  __device__ __forceinline__ void raise(const T (&largest)[kSlots]) {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const bool rise = largest[i] > shift_[i];
      const T factor = rise && shift_[i] != -infinity() ? exp((shift_[i] - largest[i]) * scale()) : T(1);
      if (rise) shift_[i] = largest[i];
      sum_[i] *= factor;
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) o_[i][j][0] *= factor, o_[i][j][1] *= factor;
    }
  }
  __device__ __forceinline__ static T quad_sum(T x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }
  __device__ __forceinline__ T scale() const { return args_.general ? T(1) : static_cast<T>(call_.scale); }
  __device__ __forceinline__ static T infinity() { return FinishedRow<T>::infinity(); }

  /// After a pass with care: is a row's result not finite although its sum is, and no value that it sees?
  __device__ __forceinline__ bool overflowed(int i) const {
    T zero = 0;
#pragma unroll
    for (int j = 0; j < kValueTiles; ++j) zero += T(0) * o_[i][j][0] + T(0) * o_[i][j][1];
    const T sum = quad_sum(sum_[i]);
    return quad_sum(zero) != T(0) && !shows_[i] && sum > T(0) && sum < infinity();  // zero is that, or NaN
  }

  __device__ __forceinline__ bool finite() const {
    T zero = 0;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      zero += T(0) * sum_[i];
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) zero += T(0) * o_[i][j][0] + T(0) * o_[i][j][1];
    }
    return zero == zero;
  }

  /// O += P V for rows of V that hold a NaN or an infinity, for the queries that see them; they become 0 in the tile.
  __device__ __forceinline__ void add_hidden_values(const T (&p)[kSlots][kKeyTiles][2], Stage& tile,
                                                    const Steps& steps) {
    const int lane = static_cast<int>(lane_number()), first = steps.first();
    const auto bad = rows_not_finite<typename Shared::ValueTile>(tile.v);
    wait_for_group();
#pragma unroll 1
    for (auto left = first_row_ == 0 ? bad : 0; left != 0; left &= left - 1)
      for (int c = lane; c < kDepth; c += 32) tile.v[Shared::ValueTile::at(rules::lowest_bit(left), c)] = zero<E>();
    wait_for_group();
    const auto sees = [&](int i, int key) {
      return !steps.walk.partial() || shared_.words[group_][row_of(i)] >> (steps.tile * kKeys + key) & 1;
    };
    const auto begin = [&](int key) { return key_at(call_, task_, call_.v, first + key); };
    const auto value = [&](std::int64_t at, int c) {
      const int channel = task_.first_value + c;
      return channel < call_.d_v
                 ? static_cast<T>(reinterpret_cast<const E*>(call_.v.data)[at + channel * call_.v.channel])
                 : T(0);
    };
    for (auto left = bad; left != 0; left &= left - 1) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) shows_[i] |= sees(i, rules::lowest_bit(left));
    }
    add_not_finite(o_, p, bad, sees, begin, value);
  }

  /// Which rows of a tile hold a NaN or an infinity.
  template <class Tile>
  __device__ __forceinline__ unsigned long long rows_not_finite(const E* tile) const {
    unsigned long long bad = 0;
#pragma unroll 1
    for (int row = 0; row < kKeys; ++row) {
      bool own = false;
      for (int c = static_cast<int>(lane_number()); c < kDepth; c += 32)
        own |= !is_finite(static_cast<T>(tile[Tile::at(row, c)]));
      if (__any_sync(0xffffffffu, own)) bad |= 1ull << row;
    }
    return bad;
  }

  // --- The end -------------------------------------------------------------------------------------------------------------

  /// What the groups leave, in their order.
  __device__ __forceinline__ void join() {
    __syncthreads();
    let_next_kernel_begin();
    const int lane = static_cast<int>(lane_number());
    auto& results = *reinterpret_cast<typename Shared::Results*>(&shared_.stages);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const T sum = quad_sum(sum_[i]);
      const int row = row_of(i);
      if (!task_.exists(args_, row)) continue;
      if (lane % 4 == 0) {
        shared_.largest[group_][row] = shift_[i], shared_.sum[group_][row] = sum;
        shared_.seen[group_][row] = seen_[i], shared_.weight[group_][row] = T(1) / weight_[i];
      }
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) results.o[group_][row][8 * j + 2 * (lane % 4) + e] = o_[i][j][e];
    }
    __syncthreads();
    const int rows = min(kRows, args_.rows - task_.first_row);
    if (static_cast<int>(threadIdx.x) < rows) weigh(static_cast<int>(threadIdx.x));
    __syncthreads();
    const int channels = min(call_.d_v - task_.first_value, kDepth);
    for (int n = threadIdx.x; n < rows * kDepth; n += Sizes::kThreads) {
      const int row = n / kDepth, channel = n % kDepth;
      if (channel >= channels) continue;
      T o = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const T weight = shared_.weight[g][row];  // 0: nothing was seen, and 0 times what is there may be NaN
        if (weight != T(0)) o += results.o[g][row][channel] * weight;
      }
      leave(row, task_.first_value + channel, o);
    }
  }

  /// What each group's results of a row are multiplied by: their share, and what is there for P that sums to a half.
  /// The row's own numbers.
  __device__ __forceinline__ void weigh(int row) {
    T largest = -infinity(), sum = 0;
    bool seen = false;
    for (int g = 0; g < kGroups; ++g) largest = fmax(largest, shared_.largest[g][row]), seen |= shared_.seen[g][row];
    for (int g = 0; g < kGroups; ++g) {
      const T own = shared_.sum[g][row];
      const T weight = own == T(0) ? T(0) : exp((shared_.largest[g][row] - largest) * scale());
      shared_.weight[g][row] *= weight;
      sum += own * weight;
    }
    for (int g = 0; g < kGroups; ++g)
      if (shared_.weight[g][row] != T(0)) shared_.weight[g][row] /= sum;
    if (args_.parts > 1) {
      if (task_.first_value != 0) return;
      T* const to = reinterpret_cast<T*>(args_.statistics) + 3 * task_.place(args_, row);
      to[0] = largest, to[1] = sum, to[2] = seen ? 1 : 0;
    } else {
      const FinishedRow<T> finished(args_, task_.b, task_.query_head(args_, row), task_.query(args_, row), largest,
                                    scale(), sum, seen, task_.first_value == 0);
      for (int g = 0; g < kGroups; ++g) shared_.weight[g][row] *= finished.empty ? T(0) : finished.factor;
    }
  }

  __device__ __forceinline__ void leave(int row, int channel, T o) const {
    if (args_.parts > 1) {
      reinterpret_cast<T*>(args_.results)[task_.place(args_, row) * call_.d_v + channel] = o;
      return;
    }
    const auto& out = call_.out;
    reinterpret_cast<E*>(out.data)[task_.b * out.batch + task_.query_head(args_, row) * out.head +
                                   task_.query(args_, row) * out.sequence[2] + channel * out.channel] = rounded<E>(o);
  }

  const DecodeArgs& args_;
  const ForwardArgs& call_;
  Shared& shared_;
  const DecodeTask task_;
  const int group_, first_row_;  // first_row_: of the warp, in the block's
  const DeviceGroup& mask_;
  const std::int32_t size_;  // keys that there are
  T shift_[kSlots], sum_[kSlots];  // sum_: of this lane's keys alone
  T weight_[kSlots];               // what P is multiplied by, in passes with care
  bool seen_[kSlots], shows_[kSlots];  // shows_: in a pass with care, the row sees a value that is not finite
  T o_[kSlots][kValueTiles][2];
};

/// Joins what the parts leave of a row, in their order: a block of threads a (batch, query head, query).
template <class E, class T, int kThreads>
__device__ __forceinline__ void join_parts(const DecodeArgs& args) {
  constexpr int kWarps = kThreads / 32, kChannels = 4;  // of a lane at a time
  __shared__ T weights[DecodeArgs::most_parts], results[kWarps][32 * kChannels];
  const auto& call = args.call;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto task = static_cast<std::int32_t>(blockIdx.x);
  const auto query = task % args.queries, h = task / args.queries % call.heads, b = task / args.queries / call.heads;
  const auto row = h % call.group_heads * args.queries + query;
  const auto head = std::int64_t{b} * (call.heads / call.group_heads) + h / call.group_heads;
  const auto place = [&](int part) { return (head * args.parts + part) * args.rows + row; };
  wait_for_kernel_before();
  const T scale = args.general ? T(1) : static_cast<T>(call.scale);
  if (warp == 0) {
    const T* const statistics = reinterpret_cast<const T*>(args.statistics);
    T largest = -FinishedRow<T>::infinity(), sum = 0;
    bool seen = false;
    for (int part = lane; part < args.parts; part += 32) {
      largest = fmax(largest, statistics[3 * place(part)]);
      seen |= statistics[3 * place(part) + 2] != T(0);
    }
    for (int n = 16; n > 0; n /= 2) largest = fmax(largest, __shfl_xor_sync(0xffffffffu, largest, n));
    seen = __any_sync(0xffffffffu, seen);
    for (int part = lane; part < args.parts; part += 32) {
      const T own = statistics[3 * place(part) + 1];
      const T share = own == T(0) ? T(0) : own * exp((statistics[3 * place(part)] - largest) * scale);
      weights[part] = share;
      sum += share;
    }
    for (int n = 16; n > 0; n /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, n);
    const FinishedRow<T> finished(args, b, h, query, largest, scale, sum, seen, lane == 0);
    for (int part = lane; part < args.parts; part += 32) {
      if (weights[part] != T(0)) weights[part] = finished.empty ? T(0) : weights[part] / sum * finished.factor;
    }
  }
  __syncthreads();
  const T* const from = reinterpret_cast<const T*>(args.results);
  E* const out = reinterpret_cast<E*>(call.out.data) + b * call.out.batch + h * call.out.head +
                 query * call.out.sequence[2];
  for (int first = 0; first < call.d_v; first += 32 * kChannels) {
    T o[kChannels] = {};
#pragma unroll 4
    for (int part = warp; part < args.parts; part += kWarps) {
      const T weight = weights[part];
      const T* const at = from + place(part) * call.d_v + first + lane;
#pragma unroll
      for (int n = 0; n < kChannels; ++n)
        if (first + lane + 32 * n < call.d_v && weight != T(0)) o[n] += at[32 * n] * weight;
    }
#pragma unroll
    for (int n = 0; n < kChannels; ++n) results[warp][lane + 32 * n] = o[n];
    __syncthreads();
    for (int c = threadIdx.x; c < 32 * kChannels && first + c < call.d_v; c += kThreads) {
      T all = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) all += results[w][c];
      out[(first + c) * call.out.channel] = rounded<E>(all);
    }
    __syncthreads();
  }
}

}  // namespace anyflash::cuda
