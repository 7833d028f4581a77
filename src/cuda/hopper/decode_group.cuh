// Decoding on Hopper (sm_90a) for plain calls of 16-bit types with 17 to 64 rows: the products of decode.cuh, computed
// by warpgroups. portable/decode.cuh defines tasks and parts.
//
// A thread block has one task. It has producer warps (decode_loader.cuh) and one consumer warpgroup, which has all
// rows, padded to 64, and takes tiles of 64 keys in order: S = Q K^T, the online softmax, O += P V. As in the forward pass,
// keys and values are read where TMA has put them. So nothing has to be joined in the thread block. Q is in shared
// memory, P and O in registers. Warps without rows only take part in the products. Two thread blocks on a
// multiprocessor (one at 256 channels) hide each other's latency. Bound by reading K and V: memory needs 1800 cycles
// for a tile of 128 channels, and the products take 600.
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

template <class E, int depth, int stages>
struct GroupDecodeSizes {
  using Element = E;
  static constexpr int kDepth = depth, kStages = stages, kKeys = 64, kRows = 64;
  static constexpr int kWarps = 4, kThreads = 32 * (kWarps + 2), kRegisters = 0;
  static constexpr int kKeyWarps = 1, kJoinRows = kRows;
  static constexpr bool kOneTask = true;  ///< of a thread block: its results overlay the tiles
};

template <class Sizes>
struct GroupDecodeShared : BulkDecodeShared<Sizes> {
  alignas(1024) typename Sizes::Element q[Sizes::kRows * Sizes::kDepth];  ///< laid out as k and v
};

template <class BlockSizes>
class GroupDecodeRows : DecodeEnd<typename BlockSizes::Element, GroupDecodeShared<BlockSizes>, 1> {
  using Base = DecodeEnd<typename BlockSizes::Element, GroupDecodeShared<BlockSizes>, 1>;
  using Base::args_, Base::call_, Base::shared_, Base::task_, Base::scale, Base::infinity;

 public:
  using Sizes = BlockSizes;
  using E = typename Sizes::Element;
  using Shared = GroupDecodeShared<Sizes>;
  static constexpr int kDepth = Sizes::kDepth, kKeys = Sizes::kKeys;
  static constexpr int kTiles = kKeys / 8;               ///< of 8 keys
  static constexpr int kPart = kDepth < 128 ? 64 : 128;  ///< channels of one product of values
  static constexpr int kParts = kDepth / kPart, kPartTiles = kPart / 8;
  static constexpr int kSteps = kDepth / 16;  ///< of 16 channels

  __device__ __forceinline__ GroupDecodeRows(const BulkDecodeArgs& args, Shared& shared)
      : Base(args, shared, 0), first_row_(static_cast<int>(threadIdx.x / 32) * 16), has_rows_(first_row_ < args.rows) {}

  __device__ __forceinline__ void run() {
    const auto number = static_cast<std::int32_t>(blockIdx.x);
    this->begin(DecodeTask(args_, number, Sizes::kRows, kDepth));
    wait_for_kernel_before();
    let_next_kernel_begin();
    const auto span = span_of(args_, task_);
    if (args_.parts > 1 && span.first >= span.end) {
      this->leave_nothing(Sizes::kRows);
      return;
    }
    take_queries();
    attend(span);
    sync_threads<128>(1);  // the tiles are no longer read
    if (has_rows_) {
      if (!finite() && !attend_with_care(span, false)) attend_with_care(span, true);
      put_rows();
    }
    sync_threads<128>(1);
    this->template leave_rows<128, kDepth>(0, min(Sizes::kRows, args_.rows), shared_.results());
  }

 private:
  using Scores = float[kTiles][4];  // keys 2t, 2t + 1 of row g, then of row g + 8
  using Fragment = std::uint32_t[4];

  __device__ __forceinline__ static int g() { return static_cast<int>(lane_number() / 4); }
  __device__ __forceinline__ static int t() { return static_cast<int>(lane_number() % 4); }
  /// The lane's rows, 0 and 1.
  __device__ __forceinline__ int row(int r) const { return first_row_ + g() + 8 * r; }

  // --- Queries -------------------------------------------------------------------------------------------------------

  /// Channels from 16m on of the warp's rows, as an operand; zeros in rows and channels that do not exist.
  __device__ __forceinline__ void load_queries(Fragment& a, int m) const {
    const auto& rows = call_.q;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int own = row(n % 2), channel = 16 * m + n / 2 * 8 + 2 * t();
      a[n] = 0;
      if (!task_.exists(args_, own) || channel >= call_.d_qk) continue;
      const E* const from = reinterpret_cast<const E*>(rows.data) + task_.b * rows.batch +
                            task_.query_head(args_, own) * rows.head + task_.query(args_, own) * rows.sequence[2];
      a[n] = rows.vectors ? *reinterpret_cast<const std::uint32_t*>(from + channel)
                          : pair_of(from[channel * rows.channel], from[(channel + 1) * rows.channel]);
    }
  }

  /// Copies Q to shared memory. A thread has half a row, all of which it requests before it waits.
  __device__ __forceinline__ void take_queries() {
    constexpr int kChunks = kDepth / 16;  // of 8 channels
    const int own = static_cast<int>(threadIdx.x) / 2, first = static_cast<int>(threadIdx.x) % 2 * kChunks;
    const auto& rows = call_.q;
    const E* const from = reinterpret_cast<const E*>(rows.data) + task_.b * rows.batch +
                          task_.query_head(args_, own) * rows.head + task_.query(args_, own) * rows.sequence[2];
    const int channels = task_.exists(args_, own) ? call_.d_qk : 0;
    uint4 x[kChunks];
    if (rows.vectors) {
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        const int channel = 8 * (first + n);
        x[n] = channel < channels ? *reinterpret_cast<const uint4*>(from + channel) : uint4{0, 0, 0, 0};
      }
    } else {
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        std::uint32_t pairs[4];
        for (int i = 0; i < 4; ++i) {
          const int channel = 8 * (first + n) + 2 * i;
          pairs[i] = channel < channels ? pair_of(from[channel * rows.channel], from[(channel + 1) * rows.channel]) : 0;
        }
        x[n] = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
#pragma unroll
    for (int n = 0; n < kChunks; ++n)
      *reinterpret_cast<uint4*>(shared_.q + (first + n) / 8 * 4096 + own * 64 + ((first + n) % 8 ^ own % 8) * 8) = x[n];
    fence_proxy_async();
    sync_threads<128>(1);
  }

  // --- A task --------------------------------------------------------------------------------------------------------

  /// One pass over the keys, by the warpgroup.
  __device__ __forceinline__ void attend(const DecodeSpan& span) {
    clear_rows(false);
    const auto size = decode_keys(args_, task_.b);
#pragma unroll 1
    for (int first = span.first; first < span.end; first += kKeys) {
      shared_.tiles.wait_full(at_);
      Scores s;
      std::uint32_t p[kTiles / 2][4];
      find_scores(s);
      if (has_rows_) take_scores(s, word_of_keys<kKeys>(args_, first, size));
      pack<E>(p, s);
      if (first + kKeys > span.end) clear_values(span.end - first);
      add_values(p);
      shared_.tiles.release(at_);
      at_.advance();
    }
  }

  /// Q K^T. Over 128 channels in two chains, as in all kernels.
  __device__ __forceinline__ void find_scores(Scores& s) const {
    const auto a = describe_tile(shared_.q, 0), b = describe_tile(shared_.k[at_.stage], 0);
    const auto chain = [&](Scores& sums, int first, int end) {
#pragma unroll
      for (int d = first; d < end; d += 16)
        wgmma<false, false>(sums, a + columns_from<64>(d), b + columns_from<64>(d), d > first, E());
    };
    wgmma_fence();
    chain(s, 0, kDepth < 128 ? kDepth : 128);
    if constexpr (kDepth > 128) {
      Scores rest;
      chain(rest, 128, kDepth);
      wgmma_commit();
      wgmma_wait<0>();
      keep(s), keep(rest);
      add_scores(s, rest);
    } else {
      wgmma_commit();
      wgmma_wait<0>();
      keep(s);
    }
  }
  __device__ __forceinline__ static void add_scores(Scores& s, const Scores& rest) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] += rest[j][e];
  }

  /// Clears values after the last key, where the tile is uninitialised.
  __device__ __forceinline__ void clear_values(int keys) {
    for (int n = keys * 8 + static_cast<int>(threadIdx.x); n < kKeys * 8; n += 128)
#pragma unroll
      for (int panel = 0; panel < kDepth / 64; ++panel)
        *reinterpret_cast<uint4*>(shared_.v[at_.stage] + panel * kKeys * 64 + n * 8) = uint4{0, 0, 0, 0};
    fence_proxy_async();
    sync_threads<128>(1);
  }

  __device__ __forceinline__ void add_values(const std::uint32_t (&p)[kTiles / 2][4]) {
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      const auto b = describe_tile(shared_.v[at_.stage] + n * kPart * 64, 64 * 128);
#pragma unroll
      for (int m = 0; m < kTiles / 2; ++m) wgmma<true>(o_[n], p[m], b + rows_from(16 * m), true, E());
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < kParts; ++n) keep(o_[n]);
  }

  // --- A tile's scores -----------------------------------------------------------------------------------------------

  /// Turns products into P; word: which of the keys are visible.
  __device__ __forceinline__ void take_scores(Scores& s, rules::Word word) {
    seen_ |= word != 0;
    if (word != rules::all_bits) {
      const auto own = word >> 2 * t();
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (!(own >> (8 * j + e % 2) & 1)) s[j][e] = -infinity();
    }
    softmax_step(s);
  }

  struct SoftmaxTerms {
    const GroupDecodeRows& rows;
    __device__ __forceinline__ float scale() const { return rows.scale(); }
    __device__ __forceinline__ float unit() const { return rows.call_.unit32; }
    __device__ __forceinline__ float lag() const { return rows.call_.lag32; }
  };
  /// S becomes P, and O is rescaled.
  __device__ __forceinline__ void softmax_step(Scores& s) {
    const auto rescale = [&](int r, float factor) {
#pragma unroll
      for (int n = 0; n < kParts; ++n)
#pragma unroll
        for (int j = 0; j < kPartTiles; ++j) o_[n][j][2 * r] *= factor, o_[n][j][2 * r + 1] *= factor;
    };
    softmax_.template step<2 * kTiles>([&](int r, int n) -> float& { return s[n / 2][2 * r + n % 2]; }, rescale,
                                       SoftmaxTerms{*this});
  }

  // --- The non-finite fallback
  // -----------------------------------------------------------------------------------------

  /// A warp's pass over the keys in global memory. False if a row has overflowed.
  __device__ __forceinline__ bool attend_with_care(const DecodeSpan& span, bool halved) {
    clear_rows(halved);
    const auto size = decode_keys(args_, task_.b);
#pragma unroll 1
    for (int first = span.first; first < span.end; first += kKeys) {
      const int keys = min(kKeys, span.end - first);
      const auto word = word_of_keys<kKeys>(args_, first, size);
      Scores s;
      fallback_scores(s, first, keys);
      take_scores(s, word);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[j][e] *= weight_[e / 2];
      const auto bad = values_not_finite(first, keys);
      if (bad & word) add_hidden_values(s, first, bad & word);
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
  __device__ __forceinline__ void add_hidden_values(const Scores& p, int first, rules::Word seen) {
    Scores local;  // in local memory, since the keys are taken one by one
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) local[j][e] = p[j][e];
#pragma unroll 1
    for (; seen != 0; seen &= seen - 1) {
      const int key = rules::lowest_bit(seen);
      const E* const value = row_of(call_.v, first, key, kKeys);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float weight = __shfl_sync(0xffffffffu, local[key / 8][2 * r + key % 2],
                                         static_cast<int>(lane_number() & ~3u) | key % 8 / 2);
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
    seen_ = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float shift = -infinity();
      weight_[r] = 1;
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

  /// Writes the warp's results to shared memory, over the tiles, with their factors. (The code is short because each
  /// instruction has to be fetched to run once.)
  __device__ __forceinline__ void put_rows() {
    const float largest[2] = {quad_largest(softmax_.largest[0]), quad_largest(softmax_.largest[1])};
    const float sum[2] = {quad_sum(softmax_.sum[0]), quad_sum(softmax_.sum[1])};
    if (const int r = t(); r < 2 && task_.exists(args_, row(r))) {
      const float shift = r ? softmax_.shift[1] : softmax_.shift[0], above = r ? largest[1] : largest[0];
      const bool rise = above > shift && shift != -infinity();  // the sums so far use that shift
      const float factor = rise ? expf((shift - above) * scale()) : 1.0f;
      this->note(row(r), rise ? above : shift, (r ? sum[1] : sum[0]) * factor, seen_,
                 (r ? weight_[1] : weight_[0]) / factor);
      this->weigh(row(r));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < kParts; ++n)
#pragma unroll
        for (int j = 0; j < kPartTiles; ++j)
          *reinterpret_cast<float2*>(&shared_.results()[0][row(r)][n * kPart + 8 * j + 2 * t()]) =
              make_float2(o_[n][j][2 * r], o_[n][j][2 * r + 1]);
  }
  const int first_row_;  // of the warp's
  const bool has_rows_;
  PipelineState<Sizes::kStages> at_;
  OnlineSoftmax<E, float, 2> softmax_;
  float weight_[2];  // the factor of P in fallback passes
  bool seen_;        // do the rows see a key?
  float o_[kParts][kPartTiles][4];
};

}  // namespace anyflash::cuda
