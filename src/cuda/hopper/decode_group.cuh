// Decoding on Hopper (sm_90a) for 16-bit types with more than 8 rows, or under any mask: the products of decode.cuh,
// computed by warpgroups. portable/decode.cuh defines tasks and parts.
//
// A thread block has one task of 64 or 128 rows. Its consumer warpgroups take tiles of 64 keys in order: S = Q K^T, the
// online softmax, O += P V. As in the forward pass, keys and values are read where TMA put them, Q is in shared memory, P
// and O in registers. A producer warp finds the mask words of partial tiles, one for each row. Warps without rows only
// take part in the products. Two warpgroups hide each other's latency: those of two thread blocks on a multiprocessor
// (one at 256 channels); of a lone thread block, which take every other tile; from 65 rows on, with 64 rows each. Bound
// by reading K and V up to about 64 rows: memory needs 1800 cycles for a tile of 128 channels, and the products 600.
//
// A warp whose result is not finite repeats its keys by the non-finite fallback, with mma.sync in the same order, which
// gives its other rows the same bits. It reads keys and values from global memory, since the tiles are gone.
//
// With g = lane / 4 and t = lane % 4, a lane has the scores of rows g and g + 8 of its warp's 16, of keys 2t and 2t + 1
// of every 8, and the same channels of O.
#pragma once

#include "cuda/hopper/decode_loader.cuh"
#include "cuda/portable/decode_end.cuh"
#include "cuda/tile/accumulators.cuh"

namespace anyflash::cuda {

/// Warpgroups share the rows (row_groups) or the tiles (key_groups) of a task.
template <class E, int depth, int stages, int row_groups, int key_groups>
struct GroupDecodeSizes {
  using Element = E;
  static constexpr int kDepth = depth, kStages = stages, kKeys = 64, kRows = 64 * row_groups;
  static constexpr int kWarps = 4 * row_groups * key_groups, kThreads = 32 * (kWarps + 2);
  static constexpr int kKeyWarps = key_groups, kTileWarps = 4 * row_groups;  ///< of a row; of a tile
  static constexpr bool kMasks = true;
};

template <class Sizes>
struct GroupDecodeShared : BulkDecodeShared<Sizes> {
  alignas(1024) typename Sizes::Element q[Sizes::kRows * Sizes::kDepth];  ///< laid out as k and v
};

template <class BlockSizes>
class GroupDecodeRows : DecodeEnd<typename BlockSizes::Element, GroupDecodeShared<BlockSizes>, BlockSizes::kKeyWarps> {
  using Base = DecodeEnd<typename BlockSizes::Element, GroupDecodeShared<BlockSizes>, BlockSizes::kKeyWarps>;
  using Base::args_, Base::call_, Base::shared_, Base::warp_, Base::task_, Base::scale, Base::infinity;

 public:
  using Sizes = BlockSizes;
  using E = typename Sizes::Element;
  using Shared = GroupDecodeShared<Sizes>;
  static constexpr int kDepth = Sizes::kDepth, kKeys = Sizes::kKeys, kThreads = 32 * Sizes::kWarps;
  static constexpr int kKeyGroups = Sizes::kKeyWarps, kTileThreads = kThreads / kKeyGroups;
  static constexpr int kTiles = kKeys / 8;               ///< of 8 keys
  static constexpr int kPart = kDepth < 128 ? 64 : 128;  ///< channels of one product of values
  static constexpr int kParts = kDepth / kPart, kPartTiles = kPart / 8;
  /// racecheck counts barriers. For it both warpgroups of keys pass the same ones, also without keys.
  static constexpr bool kMeet = kForRacecheck && kKeyGroups > 1;

  __device__ __forceinline__ GroupDecodeRows(const DecodeArgs& args, Shared& shared)
      : Base(args, shared, static_cast<int>(threadIdx.x) / kTileThreads),
        first_row_(static_cast<int>(threadIdx.x) % kTileThreads / 32 * 16) {}

  __device__ __forceinline__ void run() {
    begin_task();
    wait_for_kernel_before();
    let_next_kernel_begin();
    take_queries();
    if (!attend() && args_.parts > 1) {
      this->leave_nothing(Sizes::kRows);
      return;
    }
    sync_threads<kThreads>(1);  // neither tiles nor words are read any more
    bool again = has_rows_ && !finite();
    if constexpr (kForRacecheck) again = any_of_threads<kThreads>(1, again);  // then all meet at the same barriers
    if (again) end_with_care(args_, shared_);
    else end();
  }

 private:
  using Scores = float[kTiles][4];  // keys 2t, 2t + 1 of row g, then of row g + 8
  using Fragment = std::uint32_t[4];

  __device__ __forceinline__ static int g() { return static_cast<int>(lane_number() / 4); }
  __device__ __forceinline__ static int t() { return static_cast<int>(lane_number() % 4); }
  /// The lane's rows, 0 and 1.
  __device__ __forceinline__ int row(int r) const { return first_row_ + g() + 8 * r; }

  __device__ __forceinline__ void begin_task() {
    this->begin(DecodeTask(args_, static_cast<std::int32_t>(blockIdx.x), Sizes::kRows, kDepth));
    has_rows_ = task_.exists(args_, first_row_);
  }
  __device__ __forceinline__ void end() {
    if (has_rows_) put_results();
    sync_warps_anywhere<kThreads>(1);  // no warp reads words any more
    if (has_rows_) note_rows();
    sync_warps_anywhere<kThreads>(1);
    const int rows = min(Sizes::kRows, args_.rows - task_.first_row);
    if (static_cast<int>(threadIdx.x) < rows) this->weigh(static_cast<int>(threadIdx.x));
    sync_warps_anywhere<kThreads>(1);
    this->template leave_rows<kThreads, kDepth>(0, rows, shared_.results());
  }

  // --- Queries -------------------------------------------------------------------------------------------------------

  /// Eight channels of a row of Q.
  __device__ __forceinline__ E* query_at(int row, int channel) const {
    return shared_.q + row / 64 * (64 * kDepth) + channel / 64 * 4096 + row % 64 * 64 + (channel / 8 % 8 ^ row % 8) * 8;
  }
  /// Channels from 16m on of the warp's rows, as an operand.
  __device__ __forceinline__ void load_queries(Fragment& a, int m) const {
#pragma unroll
    for (int n = 0; n < 4; ++n)
      a[n] = *reinterpret_cast<const std::uint32_t*>(query_at(row(n % 2), 16 * m + n / 2 * 8) + 2 * t());
  }

  /// Copies Q to shared memory. A thread has a part of a row, all of which it requests before it waits.
  __device__ __forceinline__ void take_queries() {
    constexpr int kOfRow = kThreads / Sizes::kRows, kChunks = kDepth / 8 / kOfRow;  // of 8 channels
    const int own = static_cast<int>(threadIdx.x) / kOfRow, first = static_cast<int>(threadIdx.x) % kOfRow * kChunks;
    const auto& rows = call_.q;
    const E* const from = reinterpret_cast<const E*>(rows.data) + task_.b * rows.batch +
                          task_.query_head(args_, own) * rows.head + task_.query(args_, own) * rows.sequence[2];
    const int channels = task_.exists(args_, own) ? call_.d_qk : 0;
    uint4 x[kChunks];
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      const int channel = 8 * (first + n);
      x[n] = channel < channels ? *reinterpret_cast<const uint4*>(from + channel) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int n = 0; n < kChunks; ++n) *reinterpret_cast<uint4*>(query_at(own, 8 * (first + n))) = x[n];
    fence_proxy_async();
    sync_threads<kThreads>(1);
  }

  // --- A task --------------------------------------------------------------------------------------------------------

  /// One pass over the warpgroup's tiles. False if the task has no keys.
  __device__ __forceinline__ bool attend() {
    clear_rows(false);
    Scores s;
    Rest rest;
    std::uint32_t p[kTiles / 2][4];
    float factor[2];
    PipelineState<kKeyGroups> words_at{warp_};
    const auto advance = [&](int tiles) {
      for (int n = 0; n < tiles; ++n) at_.advance();
      shared_.tiles.wait_full(at_);
    };
    const auto next = [&] { advance(kKeyGroups); };
    advance(warp_);
    auto tile = shared_.tile[at_.stage];
    const bool empty = tile.keys == 0 && tile.last;
    if (!kMeet && empty) return !tile.none;
    // Less code: short tasks wait until it is fetched. And no tile waits for the next one to be loaded.
    if (kKeyGroups > 1 || (Sizes::kRows == 64 && !args_.masked)) {
      for (; !empty; next(), tile = shared_.tile[at_.stage]) {
        issue_scores(s, rest);
        wgmma_wait<0>();
        if (finish_scores(s, rest, tile, words_at, factor)) rescale(factor);
        pack<E>(p, s);
        if (tile.last) break;
        issue_values(p, at_);
        finish_values(at_);
      }
    } else {  // a tile's softmax runs beside the O += P V of the tile before
      issue_scores(s, rest);
      wgmma_wait<0>();
      finish_scores(s, rest, tile, words_at, factor);
      pack<E>(p, s);
      while (!tile.last) {
        const auto before = at_;
        next();
        issue_scores(s, rest);
        issue_values(p, before);
        wgmma_wait<1>();
        tile = shared_.tile[at_.stage];
        const bool raised = finish_scores(s, rest, tile, words_at, factor);
        finish_values(before);
        if (raised) rescale(factor);
        pack<E>(p, s);
      }
    }
    if (tile.keys < kKeys) clear_values(tile.keys);
    if constexpr (kMeet) {
      sync_threads<kThreads>(1);
      if (empty) return !tile.none;
    }
    issue_values(p, at_);
    finish_values(at_);
    return true;
  }

  /// Q K^T. Over 128 channels in two chains, as in all kernels.
  using Rest = float[kDepth > 128 ? kTiles : 1][4];
  __device__ __forceinline__ void issue_scores(Scores& s, Rest& rest) const {
    const int tile = Sizes::kRows > 64 ? __shfl_sync(0xffffffffu, first_row_ / 64, 0) : 0;
    const auto a = describe_tile(shared_.q + tile * (64 * kDepth), 0), b = describe_tile(shared_.k[at_.stage], 0);
    const auto chain = [&](Scores& sums, int first, int end) {
#pragma unroll
      for (int d = first; d < end; d += 16)
        wgmma<false, false>(sums, a + columns_from<64>(d), b + columns_from<64>(d), d > first, E());
    };
    wgmma_fence();
    chain(s, 0, kDepth < 128 ? kDepth : 128);
    if constexpr (kDepth > 128) chain(rest, 128, kDepth);
    wgmma_commit();
  }
  /// As take_scores().
  __device__ __forceinline__ bool finish_scores(Scores& s, Rest& rest, const GroupTile& tile,
                                                PipelineState<kKeyGroups>& words_at, float (&factor)[2]) {
    keep(s);
    if constexpr (kDepth > 128) keep(rest), add_scores(s, rest);
    rules::Word word[2] = {rules::all_bits, rules::all_bits};
    if (tile.partial) {
      shared_.partial_tiles.wait_full(words_at);
      word[0] = shared_.words(warp_)[row(0)], word[1] = shared_.words(warp_)[row(1)];
      shared_.partial_tiles.release(words_at);
      words_at.phase ^= 1;
    }
    return has_rows_ && take_scores(s, word, factor);
  }
  __device__ __forceinline__ static void add_scores(Scores& s, const Scores& rest) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] += rest[j][e];
  }

  /// Clears values after the last key, where the tile is uninitialised.
  __device__ __forceinline__ void clear_values(int keys) {
    for (int n = keys * 8 + static_cast<int>(threadIdx.x) % kTileThreads; n < kKeys * 8; n += kTileThreads)
#pragma unroll
      for (int panel = 0; panel < kDepth / 64; ++panel)
        *reinterpret_cast<uint4*>(shared_.v[at_.stage] + panel * kKeys * 64 + n * 8) = uint4{0, 0, 0, 0};
    fence_proxy_async();
    if constexpr (!kMeet) sync_threads<kTileThreads>(kKeyGroups > 1 ? 2 + warp_ : 1);
  }

  __device__ __forceinline__ void issue_values(const std::uint32_t (&p)[kTiles / 2][4],
                                               PipelineState<Sizes::kStages> at) {
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      const auto b = describe_tile(shared_.v[at.stage] + n * kPart * 64, 64 * 128);
#pragma unroll
      for (int m = 0; m < kTiles / 2; ++m) wgmma<true>(o_[n], p[m], b + rows_from(16 * m), true, E());
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void finish_values(PipelineState<Sizes::kStages> at) {
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kParts; ++n) keep(o_[n]);
    shared_.tiles.release(at);
  }
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kParts; ++n)
#pragma unroll
      for (int j = 0; j < kPartTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[n][j][e] *= factor[e / 2];
  }

  // --- A tile's scores -----------------------------------------------------------------------------------------------

  struct SoftmaxTerms {
    const GroupDecodeRows& rows;
    __device__ __forceinline__ float scale() const { return rows.scale(); }
    __device__ __forceinline__ float unit() const { return rows.call_.unit32; }
    __device__ __forceinline__ float lag() const { return rows.call_.lag32; }
  };
  /// Turns products into P. word: the keys that a row sees. True if O has to be multiplied by `factor`.
  __device__ __forceinline__ bool take_scores(Scores& s, const rules::Word (&word)[2], float (&factor)[2]) {
    const float shift[2] = {softmax_.shift[0], softmax_.shift[1]};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      seen_[r] |= word[r] != 0;
      if (word[r] == rules::all_bits) continue;
      const auto own = word[r] >> 2 * t();
#pragma unroll
      for (int n = 0; n < 2 * kTiles; ++n)
        if (!(own >> (8 * (n / 2) + n % 2) & 1)) s[n / 2][2 * r + n % 2] = -infinity();
    }
    softmax_.template step<2 * kTiles>([&](int r, int n) -> float& { return s[n / 2][2 * r + n % 2]; },
                                       [](int, float) {}, SoftmaxTerms{*this});
    // This branch needs the sums: ptxas moves the wait for O += P V over exponentials, but over no branch.
    const bool changed = shift[0] != softmax_.shift[0] || shift[1] != softmax_.shift[1] ||
                         !(softmax_.sum[0] + softmax_.sum[1] < infinity());
    if (!__any_sync(0xffffffffu, changed)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      factor[r] = shift[r] == softmax_.shift[r] || shift[r] == -infinity()
                      ? 1.0f
                      : expf((shift[r] - softmax_.shift[r]) * scale());
    return true;
  }

  // --- The non-finite fallback ---------------------------------------------------------------------------------------

  /// Computes a warp's results once more. A call, with nothing to keep for later: inlined, it would make the other passes
  /// spill registers.
  __device__ __noinline__ static void end_with_care(const DecodeArgs& args, Shared& shared) {
    GroupDecodeRows rows(args, shared);
    rows.begin_task();
    if (rows.has_rows_ && !rows.attend_with_care(false)) rows.attend_with_care(true);
    rows.end();
  }

  /// A warp's pass over the keys in global memory. False if a row has overflowed.
  __device__ __forceinline__ bool attend_with_care(bool halved) {
    clear_rows(halved);
    const auto size = decode_keys(args_, task_.b);
    auto* const words = shared_.words(warp_) + first_row_;
    int tile = 0;
#pragma unroll 1
    for (auto walk = walk_of_task(args_, task_, size, args_.masked); walk.more(); walk.step()) {
      if (tile++ % kKeyGroups != warp_) continue;
      const int first = walk.block * kKeys, keys = min(kKeys, size - first);
      __syncwarp();
      find_words_of_rows<16>(args_, task_, first_row_, walk, word_of_keys<kKeys>(args_, first, size), words);
      __syncwarp();
      const rules::Word word[2] = {words[g()], words[g() + 8]};
      Scores s;
      fallback_scores(s, first, keys);
      if (float factor[2]; take_scores(s, word, factor)) rescale(factor);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[j][e] *= weight_[e / 2];
      const auto bad = values_not_finite(first, keys);
      if (bad) add_hidden_values(s, first, bad, word);
      add_fallback_values(s, first, keys, bad);
    }
    return !__any_sync(0xffffffffu, overflowed(0) | overflowed(1));
  }

  /// The beginning of a key's row in a tensor, for the task's head; null after the last of the tile's keys.
  __device__ __forceinline__ const E* row_of(const Rows& rows, int first, int key, int keys) const {
    return key < keys ? reinterpret_cast<const E*>(rows.data) + key_at(call_, task_, rows, first + key) : nullptr;
  }

  __device__ __forceinline__ void fallback_scores(Scores& s, int first, int keys) const {
    add_fallback_products(s, first, keys, 0, min(kDepth, 128));
    if constexpr (kDepth > 128) {
      Scores rest;
      add_fallback_products(rest, first, keys, 128, kDepth);
      add_scores(s, rest);
    }
  }
  __device__ __forceinline__ void add_fallback_products(Scores& s, int first, int keys, int channel, int end) const {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0;
#pragma unroll 1
    for (; channel < end; channel += 16) {
      Fragment a;
      load_queries(a, channel / 16);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const E* const key = row_of(call_.k, first, 8 * j + g(), keys);
        std::uint32_t b[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int own = channel + 8 * n + 2 * t();
          b[n] = key && own < call_.d_qk ? *reinterpret_cast<const std::uint32_t*>(key + own) : 0;
        }
        multiply_few(s[j], a, b);
      }
    }
  }
  __device__ __forceinline__ static void multiply_few(float (&c)[4], const Fragment& a, const std::uint32_t (&b)[2]) {
    float c01[2] = {c[0], c[1]}, c23[2] = {c[2], c[3]};
    multiply_16(c01, c23, a, b[0], b[1], E());
    c[0] = c01[0], c[1] = c01[1], c[2] = c23[0], c[3] = c23[1];
  }

  /// The values of a tile that hold a NaN or an infinity.
  __device__ __forceinline__ rules::Word values_not_finite(int first, int keys) const {
    const int channels = min(call_.d_v - task_.first_value, kDepth);
    rules::Word bad = 0;
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      const E* const value = row_of(call_.v, first, static_cast<int>(lane_number()) + 32 * n, keys);
      bool own = false;
      if (value) {
#pragma unroll 1
        for (int c = 0; c < channels; ++c) own |= !is_finite(static_cast<float>(value[task_.first_value + c]));
      }
      bad |= rules::Word{__ballot_sync(0xffffffffu, own)} << 32 * n;
    }
    return bad;
  }

  /// O += P V for such values, for the queries that see them.
  __device__ __forceinline__ void add_hidden_values(const Scores& p, int first, rules::Word bad,
                                                    const rules::Word (&word)[2]) {
    Scores local;  // in local memory, since the keys are taken one by one
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) local[j][e] = p[j][e];
#pragma unroll 1
    for (; bad != 0; bad &= bad - 1) {
      const int key = rules::lowest_bit(bad);
      const E* const value = row_of(call_.v, first, key, kKeys);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float weight = __shfl_sync(0xffffffffu, local[key / 8][2 * r + key % 2],
                                         static_cast<int>(lane_number() & ~3u) | key % 8 / 2);
        if (!(word[r] >> key & 1)) continue;
#pragma unroll
        for (int n = 0; n < kParts; ++n)
#pragma unroll
          for (int j = 0; j < kPartTiles; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int channel = task_.first_value + n * kPart + 8 * j + 2 * t() + e;
              if (channel < call_.d_v) o_[n][j][2 * r + e] += weight * static_cast<float>(value[channel]);
            }
      }
    }
  }

  /// O += P V for the other values, from global memory.
  __device__ __forceinline__ void add_fallback_values(const Scores& s, int first, int keys, rules::Word bad) {
    const int channels = call_.d_v - task_.first_value;
    std::uint32_t p[kTiles / 2][4];
    pack<E>(p, s);
#pragma unroll 1
    for (int m = 0; m < kTiles / 2; ++m) {
      const E* values[4];  // of keys 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int key = 16 * m + 2 * t() + n % 2 + n / 2 * 8;
        values[n] = bad >> key & 1 ? nullptr : row_of(call_.v, first, key, keys);
      }
#pragma unroll
      for (int j = 0; j < kDepth / 8; ++j) {
        const int channel = 8 * j + g();
        E x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = values[n] && channel < channels ? values[n][task_.first_value + channel] : zero<E>();
        const std::uint32_t b[2] = {pair_of(x[0], x[1]), pair_of(x[2], x[3])};
        multiply_few(o_[j / kPartTiles][j % kPartTiles], p[m], b);
      }
    }
  }

  // --- Rows ----------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void clear_rows(bool halved) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float shift = -infinity();
      seen_[r] = false, weight_[r] = 1;
      if (halved) {  // all lanes take part in the sum; rows that did not overflow keep their bits
        const float sum = quad_sum(softmax_.sum[r]);
        if (overflowed(r)) shift = softmax_.shift[r], weight_[r] = 0.5f / sum;
      }
      softmax_.shift[r] = shift, softmax_.largest[r] = -infinity(), softmax_.sum[r] = 0;
    }
#pragma unroll
    for (int n = 0; n < kParts; ++n)
#pragma unroll
      for (int j = 0; j < kPartTiles; ++j) o_[n][j][0] = o_[n][j][1] = o_[n][j][2] = o_[n][j][3] = 0;
  }

  __device__ __forceinline__ float zero_of(int r) const {  // 0, or NaN if one of the row's numbers is not finite
    float zero = 0;
#pragma unroll
    for (int n = 0; n < kParts; ++n)
#pragma unroll
      for (int j = 0; j < kPartTiles; ++j) zero += 0.0f * o_[n][j][2 * r] + 0.0f * o_[n][j][2 * r + 1];
    return zero;
  }
  /// Are all of the warp's results finite?
  __device__ __forceinline__ bool finite() const {
    const float zero = zero_of(0) + zero_of(1) + 0.0f * softmax_.sum[0] + 0.0f * softmax_.sum[1];
    return __all_sync(0xffffffffu, zero == zero);
  }
  /// After a fallback pass: is a row's result not finite although its sum is?
  __device__ __forceinline__ bool overflowed(int r) const {
    const float zero = quad_sum(zero_of(r)), sum = quad_sum(softmax_.sum[r]);
    return zero != 0.0f && sum > 0.0f && sum < infinity();  // zero is 0, or NaN
  }

  /// Writes the warp's results to shared memory, over the tiles. (The code is short because each instruction has to be
  /// fetched to run once.)
  __device__ __forceinline__ void put_results() const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < kParts; ++n)
#pragma unroll
        for (int j = 0; j < kPartTiles; ++j)
          *reinterpret_cast<float2*>(&shared_.results()[warp_][row(r)][n * kPart + 8 * j + 2 * t()]) =
              make_float2(o_[n][j][2 * r], o_[n][j][2 * r + 1]);
  }
  /// Writes the factors of the results, and statistics, which lie where words did.
  __device__ __forceinline__ void note_rows() {
    const float largest[2] = {quad_largest(softmax_.largest[0]), quad_largest(softmax_.largest[1])};
    const float sum[2] = {quad_sum(softmax_.sum[0]), quad_sum(softmax_.sum[1])};
    if (const int r = t(); r < 2 && task_.exists(args_, row(r))) {
      const float shift = r ? softmax_.shift[1] : softmax_.shift[0], above = r ? largest[1] : largest[0];
      const bool rise = above > shift && shift != -infinity();  // the sums so far use that shift
      const float factor = rise ? expf((shift - above) * scale()) : 1.0f;
      this->note(row(r), rise ? above : shift, (r ? sum[1] : sum[0]) * factor, r ? seen_[1] : seen_[0],
                 (r ? weight_[1] : weight_[0]) / factor);
    }
  }

  const int first_row_;  // of the warp's
  bool has_rows_;
  PipelineState<Sizes::kStages> at_;
  OnlineSoftmax<E, float, 2> softmax_;
  float weight_[2];  // the factor of P in fallback passes
  bool seen_[2];     // do the rows see a key?
  float o_[kParts][kPartTiles][4];
};

}  // namespace anyflash::cuda
