// The per-row state of the decode kernels: the largest product, the sum and O so far. Also the softmax of a tile, and
// the join of the results of a thread block's warps.
#pragma once

#include "cuda/portable/decode_end.cuh"

namespace anyflash::cuda {

template <class E, class Sizes>
class DecodeRows : protected DecodeEnd<E, DecodeShared<E, Sizes>, Sizes::kWarps> {
  using Base = DecodeEnd<E, DecodeShared<E, Sizes>, Sizes::kWarps>;

 public:
  using Shared = DecodeShared<E, Sizes>;
  using Products = typename Shared::Products;
  using T = typename Shared::T;
  using Stage = typename Shared::Stage;
  static constexpr int kRowGroups = Sizes::kRowGroups, kKeys = Sizes::kKeys, kKeyTiles = kKeys / 8,
                       kDepth = Sizes::kDepth;
  static constexpr int kValueTiles = kDepth / 8, kRows = Sizes::kRows, kWarps = Sizes::kWarps;
  static constexpr int kStages = Sizes::kStages;

 protected:
  using Base::args_, Base::call_, Base::shared_, Base::warp_, Base::task_, Base::scale, Base::infinity;
  using Base::note, Base::weigh, Base::leave;

  __device__ __forceinline__ DecodeRows(const DecodeArgs& args, Shared& shared)
      : Base(args, shared, static_cast<int>(threadIdx.x / 32)) {}

  /// A warp's results of its rows.
  struct Results {
    T shift[kRowGroups], sum[kRowGroups], o[kRowGroups][kValueTiles][2];
    bool seen[kRowGroups];
  };

  __device__ __forceinline__ void give(Results& results) const {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      results.shift[i] = shift_[i], results.sum[i] = sum_[i], results.seen[i] = seen_[i];
    }
    copy(results.o, o_);
  }
  __device__ __forceinline__ void take_over(const Results& results) {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      shift_[i] = results.shift[i], sum_[i] = results.sum[i], seen_[i] = results.seen[i];
    }
    copy(o_, results.o);
  }

  // A lane copies 16 bytes at a time: the same channels of every kStep-th row.
  static constexpr int kNumbers = 16 / sizeof(E), kChunks = kDepth / kNumbers;
  static constexpr int kStep = kChunks < 32 ? 32 / kChunks : 1, kParts = kChunks > 32 ? kChunks / 32 : 1;
  static_assert(kKeys % kStep == 0 && (kChunks % 32 == 0 || 32 % kChunks == 0));

  /// The lane's first row and channels of a key head; with pages, in the first page.
  __device__ __forceinline__ const E* lane_rows(const Rows& rows, const DecodeTask& task, int first_channel) const {
    const int lane = static_cast<int>(lane_number());
    return reinterpret_cast<const E*>(rows.data) + first_channel + (call_.paged ? 0 : task.b * rows.batch) +
           task.head * rows.head + lane / kChunks * rows.sequence[2] + lane % kChunks * kNumbers;
  }

  /// The rows of Q, offset for products that add the offset of their own warp.
  __device__ __forceinline__ const E* own_rows() const {
    return shared_.q - warp_ * kRows * Shared::QueryTile::kStride;
  }
  __device__ __forceinline__ static int row_of(int i) { return 8 * i + static_cast<int>(lane_number() / 4); }

  /// s becomes P; adds it to the rows' sums.
  __device__ __forceinline__ void softmax(T (&s)[kRowGroups][kKeyTiles][2]) {
    T largest[kRowGroups];  // of the lane's own keys; a row's maximum is reduced over lanes only where it may rise
    bool high = false;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      largest[i] = s[i][0][0];
#pragma unroll
      for (int n = 1; n < 2 * kKeyTiles; ++n) largest[i] = fmax(largest[i], s[i][n / 2][n % 2]);
      high |= largest[i] > shift_[i];
    }
    if (__any_sync(0xffffffffu, high)) raise(largest);
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
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

  /// exp((x - shift) scale). The difference is computed first, so that the largest score's P is exactly 1, however
  /// large the score is.
  __device__ __forceinline__ T exponential(T x, T shift) const {
    if constexpr (sizeof(E) > 2) {
      return exp((x - shift) * (sizeof(T) == 8 ? static_cast<T>(call_.unit) : call_.unit32));
    } else {
      return exp2_approximately((x - shift) * call_.unit32);
    }
  }

  __device__ __forceinline__ void raise(T (&largest)[kRowGroups]) {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      largest[i] = quad_largest(largest[i]);
      const bool rise = largest[i] > shift_[i];
      const T factor = rise && shift_[i] != -infinity() ? exp((shift_[i] - largest[i]) * scale()) : T(1);
      if (rise) shift_[i] = largest[i];
      sum_[i] *= factor;
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) o_[i][j][0] *= factor, o_[i][j][1] *= factor;
    }
  }

  __device__ __forceinline__ bool finite() const {
    T zero = 0;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      zero += T(0) * sum_[i];
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) zero += T(0) * o_[i][j][0] + T(0) * o_[i][j][1];
    }
    return zero == zero;
  }

  __device__ __forceinline__ void clear_rows(bool halved) {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      T shift = -infinity();
      weight_[i] = 1;
      if (halved) {  // all lanes take part in the sum; rows that did not overflow keep their bits
        const T sum = quad_sum(sum_[i]);
        if (overflowed_[i]) shift = shift_[i], weight_[i] = T(0.5) / sum;
      }
      shift_[i] = shift, sum_[i] = 0, seen_[i] = false;
    }
    clear(o_);
  }

  /// In the non-finite fallback.
  __device__ __forceinline__ void halve(T (&p)[kRowGroups][kKeyTiles][2]) const {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kKeyTiles; ++n) p[i][n / 2][n % 2] *= weight_[i];
  }

  /// After a fallback pass: is any row's result not finite although its sum is?
  __device__ __forceinline__ bool any_overflowed() {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      T zero = 0;
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j) zero += T(0) * o_[i][j][0] + T(0) * o_[i][j][1];
      const T sum = quad_sum(sum_[i]);
      overflowed_[i] = quad_sum(zero) != T(0) && sum > T(0) && sum < infinity();  // zero is 0, or NaN
      any |= overflowed_[i];
    }
    return any;
  }

  /// O += P V for the rows of V that the products cannot take, for the queries that see them; these rows become 0 in
  /// the tile. first: the tile's first key; sees(i, key): does slot i see key `key` of the tile?
  template <class Sees>
  __device__ __forceinline__ void add_hidden_values(const T (&p)[kRowGroups][kKeyTiles][2], int first, E* v,
                                                    const Sees& sees) {
    const int lane = static_cast<int>(lane_number());
    const auto apart = rows_without<typename Shared::ValueTile>(v, [](T x) { return bears<Products>(x); });
    __syncwarp();
#pragma unroll 1
    for (auto left = apart; left != 0; left &= left - 1)
      for (int c = lane; c < kDepth; c += 32) v[Shared::ValueTile::at(rules::lowest_bit(left), c)] = zero<E>();
    __syncwarp();
    const auto begin = [&](int key) { return key_at(call_, task_, call_.v, first + key); };
    const auto value = [&](std::int64_t at, int c) {
      const int channel = task_.first_value + c;
      return channel < call_.d_v
                 ? static_cast<T>(reinterpret_cast<const E*>(call_.v.data)[at + channel * call_.v.channel])
                 : T(0);
    };
    add_not_finite(o_, p, apart, sees, begin, value);
  }

  /// The rows of a tile with a NaN or an infinity.
  template <class Tile>
  __device__ __forceinline__ unsigned long long rows_not_finite(const E* tile) const {
    return rows_without<Tile>(tile, [](T x) { return is_finite(x); });
  }
  /// The rows with a number that is not good().
  template <class Tile, class Good>
  __device__ __forceinline__ unsigned long long rows_without(const E* tile, const Good& good) const {
    unsigned long long bad = 0;
#pragma unroll 1
    for (int row = 0; row < kKeys; ++row) {
      bool own = false;
      for (int c = static_cast<int>(lane_number()); c < kDepth; c += 32)
        own |= !good(static_cast<T>(tile[Tile::at(row, c)]));
      if (__any_sync(0xffffffffu, own)) bad |= 1ull << row;
    }
    return bad;
  }

  // --- The end -------------------------------------------------------------------------------------------------------

  /// Joins the warps' results in a fixed order, in free stages. put(own, first, rows): writes the warp's results of the
  /// kJoinRows rows from `first` on.
  template <class Put>
  __device__ __forceinline__ void join(int free_stage, const Put& put) {
    constexpr int kJoinRows = Shared::kJoinRows;
    const int lane = static_cast<int>(lane_number()), rows = min(kRows, args_.rows - task_.first_row);
    const int channels = min(call_.d_v - task_.first_value, kDepth);
    __syncwarp();  // the stage is no longer read
    if (lane == 0) shared_.free[warp_] = free_stage;
#pragma unroll
    for (int first = 0; first < kRows; first += kJoinRows) {
      put(*reinterpret_cast<typename Shared::Results*>(&shared_.stages[warp_][free_stage]), first, rows);
      __syncthreads();
      const int end = min(first + kJoinRows, rows);
      if (const int row = first + static_cast<int>(threadIdx.x); row < end) weigh(row);
      __syncthreads();
      for (int n = first * kDepth + static_cast<int>(threadIdx.x); n < end * kDepth; n += Sizes::kThreads) {
        const int row = n / kDepth, channel = n % kDepth;
        if (channel >= channels) continue;
        const T o = this->mean(row, [&](int w) {
          const auto& its = *reinterpret_cast<const typename Shared::Results*>(&shared_.stages[w][shared_.free[w]]);
          return its[row - first][channel];
        });
        leave(row, task_.first_value + channel, o);
      }
      __syncthreads();  // the stages are free again
    }
  }
  __device__ __forceinline__ void join(int free_stage) {
    join(free_stage, [&](typename Shared::Results& own, int first, int rows) {
      const int lane = static_cast<int>(lane_number());
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i) {
        if (8 * i < first || 8 * i >= first + Shared::kJoinRows) continue;
        const T sum = quad_sum(sum_[i]);
        const int row = row_of(i);
        if (row >= rows) continue;
        if (lane % 4 == 0) note(row, shift_[i], sum, seen_[i], weight_[i]);
#pragma unroll
        for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) own[row - first][8 * j + 2 * (lane % 4) + e] = o_[i][j][e];
      }
    });
  }

  T shift_[kRowGroups], sum_[kRowGroups];  // sum_: over this lane's keys only
  T weight_[kRowGroups];                   // the factor of P in fallback passes
  bool seen_[kRowGroups];
  bool overflowed_[kRowGroups];  // in a fallback pass
  T o_[kRowGroups][kValueTiles][2];
};

}  // namespace anyflash::cuda
