// The rows of the plain kernel for at most 8 rows of 16-bit types. Both products are transposed, S^T = K Q^T and O^T +=
// V^T P^T. The tensor cores need at least 16 rows in their first operand, but only 8 columns in the second. This halves
// products and registers. Latency matters because only few warps fit.
//
// With g = lane / 4 and t = lane % 4, a lane has the scores of keys g and g + 8, and channels g and g + 8 of every 16
// of O, for queries 2t and 2t + 1.
#pragma once

#include "cuda/portable/decode_rows.cuh"

namespace anyflash::cuda {

template <class E, class Sizes>
class NarrowDecodeRows : public DecodeRows<E, Sizes> {
  using Base = DecodeRows<E, Sizes>;

 public:
  using Base::kDepth, Base::kKeys, Base::kRows;
  using typename Base::Shared, typename Base::T;
  static constexpr int kChannelTiles = kDepth / 16, kQueries = 2;  // per lane
  using Scores = float[4];                                         // key g for queries 2t, 2t + 1; then key g + 8
  static_assert(kRows == 8 && kKeys == 16 && sizeof(E) == 2);

 protected:
  using Base::args_, Base::call_, Base::shared_, Base::warp_, Base::task_, Base::infinity;
  using QueryTile = typename Shared::QueryTile;
  using KeyTile = typename Shared::KeyTile;
  using ValueTile = typename Shared::ValueTile;

  __device__ __forceinline__ NarrowDecodeRows(const DecodeArgs& args, Shared& shared) : Base(args, shared) {}

  /// Call it once the rows of Q are in shared memory.
  __device__ __forceinline__ void take_queries() {
    const unsigned lane = lane_number();
    const E* const q = shared_.q + lane % 8 * QueryTile::kStride + lane / 8 * 8;
#pragma unroll
    for (int c = 0; c < kDepth / 32; ++c) load_matrices(q_[c], q + 32 * c);
  }

  __device__ __forceinline__ void clear_rows(bool halved) {
#pragma unroll
    for (int e = 0; e < kQueries; ++e) {
      T shift = -infinity();
      weight_[e] = 1;
      if (halved) {  // all lanes take part in the sum; rows that did not overflow keep their bits
        const T sum = column_sum(sum_[e]);
        if (overflowed_[e]) shift = shift_[e], weight_[e] = 0.5f / sum;
      }
      shift_[e] = shift, sum_[e] = 0;
    }
#pragma unroll
    for (int m = 0; m < kChannelTiles; ++m) o_[m][0][0] = o_[m][0][1] = o_[m][1][0] = o_[m][1][1] = 0;
  }

  /// In the same chains as products.cuh, because the backward pass needs the same scores.
  __device__ __forceinline__ void find_scores(Scores& s, const E* k, bool) const {
    const unsigned lane = lane_number();
    k += lane % 16 * KeyTile::kStride + lane / 16 * 8;
    constexpr int kSteps = kDepth / 16, kChains = kSteps > 8 ? 2 : 1;
    float sums[kChains][2][2] = {};
    std::uint32_t a[3][4];
    const auto step = [](int n) { return n % kChains * 8 + n / kChains; };  // the chains alternate
    load_matrices(a[0], k + 16 * step(0));
    load_matrices(a[1], k + 16 * step(1));
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      const int m = step(n);
      if (n + 2 < kSteps) load_matrices(a[(n + 2) % 3], k + 16 * step(n + 2));
      multiply_16(sums[n % kChains][0], sums[n % kChains][1], a[n % 3], q_[m / 2][m % 2 * 2], q_[m / 2][m % 2 * 2 + 1],
                  E());
    }
#pragma unroll
    for (int n = 0; n < 4; ++n)
      s[n] = kChains == 1 ? sums[0][n / 2][n % 2] : sums[0][n / 2][n % 2] + sums[1][n / 2][n % 2];
  }

  __device__ __forceinline__ static void hide(Scores& s, rules::Word word) {
    const auto own = static_cast<std::uint32_t>(word >> (lane_number() / 4));
    if (!(own & 1)) s[0] = s[1] = -infinity();
    if (!(own >> 8 & 1)) s[2] = s[3] = -infinity();
  }

  /// s becomes P; adds it to the rows' sums.
  __device__ __forceinline__ void softmax(Scores& s) {
    const float largest[kQueries] = {fmax(s[0], s[2]), fmax(s[1], s[3])};
    if (__any_sync(0xffffffffu, largest[0] > shift_[0] || largest[1] > shift_[1])) raise(largest);
#pragma unroll
    for (int e = 0; e < kQueries; ++e) {
      const float shift = shift_[e] == -infinity() ? 0.0f : shift_[e];  // exp(-inf - 0) = 0, and a NaN stays one
      s[e] = this->exponential(s[e], shift), s[e + 2] = this->exponential(s[e + 2], shift);
      sum_[e] += s[e] + s[e + 2];
    }
  }

  /// In the non-finite fallback.
  __device__ __forceinline__ void halve(Scores& p) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) p[n] *= weight_[n % kQueries];
  }

  __device__ __forceinline__ void add_values(const Scores& p, const E* v, bool) {
    const std::uint32_t b0 = transposed_matrix(packed_pair(p[0], p[1], E()));
    const std::uint32_t b1 = transposed_matrix(packed_pair(p[2], p[3], E()));
    const unsigned lane = lane_number();
    v += (lane % 8 + lane / 16 * 8) * ValueTile::kStride + lane / 8 % 2 * 8;
    std::uint32_t a[3][4];
    load_matrices_transposed(a[0], v);
    load_matrices_transposed(a[1], v + 16);
#pragma unroll
    for (int m = 0; m < kChannelTiles; ++m) {
      if (m + 2 < kChannelTiles) load_matrices_transposed(a[(m + 2) % 3], v + 16 * (m + 2));
      multiply_16(o_[m][0], o_[m][1], a[m % 3], b0, b1, E());
    }
  }

  __device__ __forceinline__ bool finite() const {
    float zero = 0.0f * sum_[0] + 0.0f * sum_[1];
#pragma unroll
    for (int m = 0; m < kChannelTiles; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n) zero += 0.0f * o_[m][n / 2][n % 2];
    return zero == zero;
  }

  /// After a fallback pass: is any row's result not finite although its sum is?
  __device__ __forceinline__ bool any_overflowed() {
#pragma unroll
    for (int e = 0; e < kQueries; ++e) {
      float zero = 0;
#pragma unroll
      for (int m = 0; m < kChannelTiles; ++m) zero += 0.0f * o_[m][0][e] + 0.0f * o_[m][1][e];
      const float sum = column_sum(sum_[e]);
      overflowed_[e] = column_sum(zero) != 0.0f && sum > 0.0f && sum < infinity();  // zero, or NaN
    }
    return overflowed_[0] | overflowed_[1];
  }

  /// O += P V for rows of V with a NaN or an infinity, if the queries see them; these rows become 0 in the tile.
  __device__ __forceinline__ void add_hidden_values(const Scores& p, int first, E* v, rules::Word word) {
    const int lane = static_cast<int>(lane_number());
    const auto bad = this->template rows_not_finite<ValueTile>(v);
    __syncwarp();
#pragma unroll 1
    for (auto left = bad; left != 0; left &= left - 1) {
      const int row = rules::lowest_bit(left);
      for (int c = lane; c < kDepth; c += 32) v[ValueTile::at(row, c)] = zero<E>();
      if (!(word >> row & 1)) continue;
      const E* const at = reinterpret_cast<const E*>(call_.v.data) + key_at(call_, task_, call_.v, first + row);
#pragma unroll
      for (int e = 0; e < kQueries; ++e) {
        const float weight = __shfl_sync(0xffffffffu, row < 8 ? p[e] : p[e + 2], row % 8 * 4 + lane % 4);
#pragma unroll
        for (int n = 0; n < 2 * kChannelTiles; ++n) {
          const int channel = task_.first_value + 8 * n + lane / 4;
          if (channel < call_.d_v) o_[n / 2][n % 2][e] += weight * static_cast<float>(at[channel * call_.v.channel]);
        }
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void join(int free_stage, bool seen) {
    Base::join(free_stage, [&](typename Shared::Results& own, int, int rows) {
      const int g = static_cast<int>(lane_number() / 4);
#pragma unroll
      for (int e = 0; e < kQueries; ++e) {
        const float sum = column_sum(sum_[e]);
        const int row = 2 * static_cast<int>(lane_number() % 4) + e;
        if (row >= rows) continue;
        if (g == 0) this->note(row, shift_[e], sum, seen, weight_[e]);
#pragma unroll
        for (int n = 0; n < 2 * kChannelTiles; ++n) own[row][8 * n + g] = o_[n / 2][n % 2][e];
      }
    });
  }

 private:
  __device__ __forceinline__ void raise(const float (&own)[kQueries]) {
#pragma unroll
    for (int e = 0; e < kQueries; ++e) {
      float largest = own[e];
#pragma unroll
      for (int n = 4; n < 32; n *= 2) largest = fmax(largest, __shfl_xor_sync(0xffffffffu, largest, n));
      const bool rise = largest > shift_[e];
      const float factor = rise && shift_[e] != -infinity() ? exp((shift_[e] - largest) * this->scale()) : 1.0f;
      if (rise) shift_[e] = largest;
      sum_[e] *= factor;
#pragma unroll
      for (int m = 0; m < kChannelTiles; ++m) o_[m][0][e] *= factor, o_[m][1][e] *= factor;
    }
  }
  /// Over the lanes that have the same queries.
  __device__ __forceinline__ static float column_sum(float x) {
#pragma unroll
    for (int n = 4; n < 32; n *= 2) x += __shfl_xor_sync(0xffffffffu, x, n);
    return x;
  }

  std::uint32_t q_[kDepth / 32][4];
  float shift_[kQueries], sum_[kQueries];  // sum_: over this lane's keys only
  float weight_[kQueries];                 // the factor of P in fallback passes
  bool overflowed_[kQueries];              // in a fallback pass
  float o_[kChannelTiles][2][kQueries];    // channels g and g + 8 of 16, queries
};

}  // namespace anyflash::cuda
