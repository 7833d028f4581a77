// Decoding on Hopper (sm_90a) for plain calls of 16-bit types with up to 8 rows. portable/decode_plain.cuh defines
// plain calls, portable/decode.cuh tasks and parts.
//
// A thread block has one task. Producer warps issue TMA loads of keys and values, as far ahead as shared memory allows
// (decode_loader.cuh). Of each tile a consumer warp takes 16 keys. It keeps O, the largest product and the sum of its
// rows in registers. Both products are transposed, S^T = K Q^T and O^T += V^T P^T (as in portable/decode_narrow.cuh).
// The warps' results are joined in shared memory, the parts' results by the kernel of decode_join.cuh. The number of
// parts depends on the batch, except in deterministic calls. Bound by reading K and V.
//
// A warp whose result is not finite repeats its keys by the non-finite fallback (portable/not_finite.cuh). It uses the
// same products in the same order, so that other rows keep their bits. It reads keys and values from global memory,
// since the tiles are gone: slow, but rare.
//
// With g = lane / 4 and t = lane % 4, a lane has the scores of keys g and g + 8, and channels g and g + 8 of every 16
// of O, for queries 2t and 2t + 1.
#pragma once

#include "cuda/hopper/decode_loader.cuh"
#include "cuda/portable/decode_end.cuh"

namespace anyflash::cuda {

template <class BlockSizes>
class BulkDecodeRows : DecodeEnd<typename BlockSizes::Element, BulkDecodeShared<BlockSizes>, BlockSizes::kKeyWarps> {
  using Base = DecodeEnd<typename BlockSizes::Element, BulkDecodeShared<BlockSizes>, BlockSizes::kKeyWarps>;
  using Base::args_, Base::call_, Base::shared_, Base::warp_, Base::task_, Base::scale, Base::infinity;

 public:
  using Sizes = BlockSizes;
  using E = typename Sizes::Element;
  using Shared = BulkDecodeShared<Sizes>;
  static constexpr int kDepth = Sizes::kDepth, kKeys = Sizes::kKeys, kRows = Sizes::kRows;
  static constexpr int kSteps = kDepth / 16;  ///< of 16 channels
  static constexpr int kThreads = 32 * Sizes::kWarps;

  __device__ __forceinline__ BulkDecodeRows(const BulkDecodeArgs& args, Shared& shared)
      : Base(args, shared, static_cast<int>(threadIdx.x / 32)) {}

  __device__ __forceinline__ void run() {
    this->begin(DecodeTask(args_, static_cast<std::int32_t>(blockIdx.x), kRows, kDepth));
    wait_for_kernel_before();
    let_next_kernel_begin();
    const auto span = span_of(args_, task_);
    if (args_.parts > 1 && span.first >= span.end) return this->leave_nothing(kRows);
    take_queries();
    if (!attend<false>(span, false) && !attend<true>(span, false)) attend<true>(span, true);
    join();
  }

 private:
  using Scores = float[4];            // key g for queries 2t, 2t + 1; then key g + 8
  using Fragment = std::uint32_t[4];  // 16 x 16 numbers of K, or of V^T

  __device__ __forceinline__ static int g() { return static_cast<int>(lane_number() / 4); }
  __device__ __forceinline__ static int t() { return static_cast<int>(lane_number() % 4); }

  /// Loads the rows of Q as operands; zeros in rows and channels that do not exist.
  __device__ __forceinline__ void take_queries() {
    const auto& rows = call_.q;
    const bool exists = task_.exists(args_, g());
    const E* const from = reinterpret_cast<const E*>(rows.data) +
                          (exists ? task_.b * rows.batch + task_.query_head(args_, g()) * rows.head +
                                        task_.query(args_, g()) * rows.sequence[2]
                                  : 0);
#pragma unroll
    for (int n = 0; n < 2 * kSteps; ++n) {
      const int channel = 8 * n + 2 * t();
      q_[n / 2][n % 2] = exists && channel < call_.d_qk ? *reinterpret_cast<const std::uint32_t*>(from + channel) : 0;
    }
  }

  // --- A task --------------------------------------------------------------------------------------------------------

  /// One pass over the warp's keys, as in DecodeBlock. False if the results are not finite.
  template <bool kFallback>
  __device__ __forceinline__ bool attend(const DecodeSpan& span, bool halved) {
    clear_rows(halved);
    seen_ = false;
    const auto size = decode_keys(args_, task_.b);
#pragma unroll 1
    for (int first = span.first; first < span.end; first += kKeys) {
      const int own = first + 16 * warp_;
      if constexpr (!kFallback) shared_.tiles.wait_full(at_);
      if (own < span.end) {
        Scores s;
        if constexpr (kFallback) {
          const GlobalKeys keys(*this, own, span.end);
          find_scores(s, [&](Fragment& a, int n) { keys.load(a, n); });
        } else {
          const auto* const k = shared_.k[at_.stage] + (16 * warp_ + static_cast<int>(lane_number()) % 16) * 64;
          const int half = static_cast<int>(lane_number()) / 16;
          find_scores(s, [&](Fragment& a, int n) { load_matrices(a, k + place(n, half)); });
        }
        const auto word = word_of_keys<16>(args_, own, size);
        if (word != rules::all_bits) hide(s, word);
        seen_ |= word != 0;
        softmax(s);
        if constexpr (kFallback) {
          const GlobalValues values(*this, own, span.end);
          halve(s);
          add_hidden_values(s, values, own, word);
          add_values(s, [&](Fragment& a, int m) { values.load(a, m); });
        } else {
          const int row = static_cast<int>(lane_number()) % 8 + static_cast<int>(lane_number()) / 16 * 8;
          const auto* const v = shared_.v[at_.stage] + (16 * warp_ + row) * 64;
          const int half = static_cast<int>(lane_number()) / 8 % 2;
          const auto load = [&](Fragment& a, int m) { load_matrices_transposed(a, v + place(m, half)); };
          if (own + 16 <= span.end) {
            add_values(s, load);
          } else {  // beyond the last key the tile is uninitialised
            const int keys = span.end - own - 2 * t();
            const unsigned lower = kept_values(keys), upper = kept_values(keys - 8);
            add_values(s, [&](Fragment& a, int m) {
              load(a, m);
              a[0] &= lower, a[1] &= lower, a[2] &= upper, a[3] &= upper;
            });
          }
        }
      }
      if constexpr (!kFallback) {
        shared_.tiles.release(at_);
        at_.advance();
      }
    }
    raise(largest_, 0);
    bool again = !kFallback && !finite();
    if constexpr (kFallback) again |= overflowed(0) | overflowed(1);
    return !__any_sync(0xffffffffu, again);
  }

  /// The offset of 8 of the 16 channels from 16 n on, in a row whose number is lane % 8 above a multiple of 8.
  __device__ __forceinline__ static int place(int n, int half) {
    return n / 4 * (kKeys * 64) + ((2 * (n % 4) + half) ^ static_cast<int>(lane_number()) % 8) * 8;
  }

  /// A mask for two keys' numbers that keeps the first `keys` of them.
  __device__ __forceinline__ static unsigned kept_values(int keys) {
    return keys >= 2 ? 0xffffffffu : keys == 1 ? 0xffffu : 0;
  }

  // --- Keys and values in global memory, for fallback passes ---------------------------------------------------------

  /// Keys g and g + 8 from a key on, read from global memory; zeros after the last key.
  struct GlobalKeys {
    const E* row[2];
    int channels;

    __device__ __forceinline__ GlobalKeys(const BulkDecodeRows& rows, int own, int end) : channels(rows.call_.d_qk) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = own + g() + 8 * i;
        row[i] = key < end
                     ? reinterpret_cast<const E*>(rows.call_.k.data) + key_at(rows.call_, rows.task_, rows.call_.k, key)
                     : nullptr;
      }
    }
    __device__ __forceinline__ void load(Fragment& a, int n) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int channel = 16 * n + i / 2 * 8 + 2 * t();
        const E* const from = row[i % 2];
        a[i] = from && channel < channels ? *reinterpret_cast<const std::uint32_t*>(from + channel) : 0;
      }
    }
  };

  /// Values of keys 2t, 2t + 1, 2t + 8 and 2t + 9 from a key on, read from global memory. Zeros after the last key and
  /// in rows that are not finite.
  struct GlobalValues {
    const E* row[4];
    int channels;
    unsigned bad;  // bit i: row i has a NaN or an infinity

    __device__ __forceinline__ GlobalValues(const BulkDecodeRows& rows, int own, int end)
        : channels(rows.call_.d_v - rows.task_.first_value), bad(0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = own + key_of(i);
        row[i] = key < end ? reinterpret_cast<const E*>(rows.call_.v.data) + rows.task_.first_value +
                                 key_at(rows.call_, rows.task_, rows.call_.v, key)
                           : nullptr;
        bool own_bad = false;
        if (row[i]) {
#pragma unroll 1
          for (int c = g(); c < min(channels, kDepth); c += 8) own_bad |= !is_finite(static_cast<float>(row[i][c]));
        }
        const auto lanes = __ballot_sync(0xffffffffu, own_bad);
        if (lanes & 0x11111111u << t()) row[i] = nullptr;
#pragma unroll
        for (int n = 0; n < 4; ++n)
          if (lanes & 0x11111111u << n) bad |= 1u << (2 * n + i % 2 + i / 2 * 8);
      }
    }
    __device__ __forceinline__ static int key_of(int i) { return 2 * t() + i % 2 + i / 2 * 8; }
    __device__ __forceinline__ void load(Fragment& a, int m) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int channel = 16 * m + i % 2 * 8 + g();
        E pair[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const E* const from = row[i / 2 * 2 + n];
          pair[n] = from && channel < channels ? from[channel] : zero<E>();
        }
        a[i] = pair_of(pair[0], pair[1]);
      }
    }
  };

  // --- A tile --------------------------------------------------------------------------------------------------------

  /// load(a, n): keys' channels from 16 n on. In the same chains as products.cuh, because the backward pass needs the
  /// same scores.
  template <class Load>
  __device__ __forceinline__ void find_scores(Scores& s, const Load& load) const {
    constexpr int kChains = kSteps > 8 ? 2 : 1;
    float sums[kChains][2][2] = {};
    Fragment a[3];
    const auto step = [](int n) { return n % kChains * 8 + n / kChains; };  // the chains alternate
    load(a[0], step(0));
    load(a[1], step(1));
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      if (n + 2 < kSteps) load(a[(n + 2) % 3], step(n + 2));
      multiply_16(sums[n % kChains][0], sums[n % kChains][1], a[n % 3], q_[step(n)][0], q_[step(n)][1], E());
    }
#pragma unroll
    for (int n = 0; n < 4; ++n)
      s[n] = kChains == 1 ? sums[0][n / 2][n % 2] : sums[0][n / 2][n % 2] + sums[1][n / 2][n % 2];
  }

  __device__ __forceinline__ static void hide(Scores& s, rules::Word word) {
    const auto own = static_cast<std::uint32_t>(word >> g());
    if (!(own & 1)) s[0] = s[1] = -infinity();
    if (!(own >> 8 & 1)) s[2] = s[3] = -infinity();
  }

  /// s becomes P; adds it to the rows' sums. A row's shift lags behind its maximum by at most lag32. Without the lag
  /// most tiles of a short part would rescale O, because some row's maximum rises.
  __device__ __forceinline__ void softmax(Scores& s) {
    float largest[2];
    bool high = false;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      largest[e] = fmaxf(s[e], s[e + 2]);
      high |= largest[e] > shift_[e] + call_.lag32;
      largest_[e] = fmaxf(largest_[e], largest[e]);
    }
    if (__any_sync(0xffffffffu, high)) raise(largest, call_.lag32);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float shift = shift_[e] == -infinity() ? 0.0f : shift_[e];  // exp(-inf - 0) = 0, a NaN stays one
      s[e] = exp2_approximately((s[e] - shift) * call_.unit32);
      s[e + 2] = exp2_approximately((s[e + 2] - shift) * call_.unit32);
      sum_[e] += s[e] + s[e + 2];
    }
  }
  /// Raises the shift of rows whose largest number exceeds it by more than `lag` to that number. own: maxima over this
  /// lane's keys.
  __device__ __forceinline__ void raise(const float (&own)[2], float lag) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float largest = own[e];
#pragma unroll
      for (int n = 4; n < 32; n *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, n));
      const bool rise = largest > shift_[e] + lag;
      const float factor = rise && shift_[e] != -infinity() ? expf((shift_[e] - largest) * scale()) : 1.0f;
      if (rise) shift_[e] = largest;
      sum_[e] *= factor;
#pragma unroll
      for (int m = 0; m < kSteps; ++m) o_[m][0][e] *= factor, o_[m][1][e] *= factor;
    }
  }

  /// In the non-finite fallback.
  __device__ __forceinline__ void halve(Scores& p) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) p[n] *= weight_[n % 2];
  }

  /// load(a, m): values, transposed, of channels from 16 m on.
  template <class Load>
  __device__ __forceinline__ void add_values(const Scores& p, const Load& load) {
    const std::uint32_t b[2] = {transposed_matrix(packed_pair(p[0], p[1], E())),
                                transposed_matrix(packed_pair(p[2], p[3], E()))};
    Fragment a[3];
    load(a[0], 0);
    load(a[1], 1);
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      if (m + 2 < kSteps) load(a[(m + 2) % 3], m + 2);
      multiply_16(o_[m][0], o_[m][1], a[m % 3], b[0], b[1], E());
    }
  }

  /// O += P V for rows of V with a NaN or an infinity, if the queries see them.
  __device__ __forceinline__ void add_hidden_values(const Scores& p, const GlobalValues& values, int first,
                                                    rules::Word word) {
#pragma unroll 1
    for (auto left = values.bad; left != 0; left &= left - 1) {
      const int row = __ffs(static_cast<int>(left)) - 1;
      if (!(word >> row & 1)) continue;
      const E* const at = reinterpret_cast<const E*>(call_.v.data) + key_at(call_, task_, call_.v, first + row);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float weight = __shfl_sync(0xffffffffu, row < 8 ? p[e] : p[e + 2], row % 8 * 4 + t());
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
          const int channel = task_.first_value + 8 * n + g();
          if (channel < call_.d_v) o_[n / 2][n % 2][e] += weight * static_cast<float>(at[channel]);
        }
      }
    }
  }

  // --- Rows ----------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void clear_rows(bool halved) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float shift = -infinity();
      weight_[e] = 1;
      if (halved) {  // all lanes take part in the sum; rows that did not overflow keep their bits
        const float sum = column_sum(sum_[e]);
        if (overflowed(e)) shift = shift_[e], weight_[e] = 0.5f / sum;
      }
      shift_[e] = shift, largest_[e] = -infinity(), sum_[e] = 0;
    }
#pragma unroll
    for (int m = 0; m < kSteps; ++m) o_[m][0][0] = o_[m][0][1] = o_[m][1][0] = o_[m][1][1] = 0;
  }

  __device__ __forceinline__ bool finite() const {
    float zero = 0.0f * sum_[0] + 0.0f * sum_[1];
#pragma unroll
    for (int m = 0; m < kSteps; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) zero += 0.0f * o_[m][n / 2][n % 2];
    return zero == zero;
  }

  /// After a fallback pass: is a row's result not finite although its sum is?
  __device__ __forceinline__ bool overflowed(int e) const {
    float zero = 0;
#pragma unroll
    for (int m = 0; m < kSteps; ++m) zero += 0.0f * o_[m][0][e] + 0.0f * o_[m][1][e];
    const float sum = column_sum(sum_[e]);
    return column_sum(zero) != 0.0f && sum > 0.0f && sum < infinity();  // zero is 0, or NaN
  }

  /// Over the lanes that have the same queries.
  __device__ __forceinline__ static float column_sum(float x) {
#pragma unroll
    for (int n = 4; n < 32; n *= 2) x += __shfl_xor_sync(0xffffffffu, x, n);
    return x;
  }

  /// Joins the warps' results, in the order of their keys.
  __device__ __forceinline__ void join() {
    const int rows = min(kRows, args_.rows);
    sync_threads<kThreads>(1);  // the tiles are no longer read
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = column_sum(sum_[e]);
      const int row = 2 * t() + e;
      if (row >= rows) continue;
      if (g() == 0) this->note(row, shift_[e], sum, seen_, weight_[e]);
      auto& own = shared_.results()[warp_][row];
#pragma unroll
      for (int n = 0; n < 2 * kSteps; ++n) own[8 * n + g()] = o_[n / 2][n % 2][e];
    }
    sync_threads<kThreads>(1);
    if (const int row = static_cast<int>(threadIdx.x); row < rows) this->weigh(row);
    sync_threads<kThreads>(1);
    this->template leave_rows<kThreads, kDepth>(0, rows, shared_.results());
  }

  PipelineState<Sizes::kStages> at_;
  std::uint32_t q_[kSteps][2];
  float shift_[2];             // subtracted from a row's scores
  float largest_[2], sum_[2];  // over this lane's keys only
  float weight_[2];            // the factor of P in fallback passes
  bool seen_;                  // does the task's warp see a key?
  float o_[kSteps][2][2];      // channels g and g + 8 of 16, queries
};

}  // namespace anyflash::cuda
