// Prepares Hopper's backward kernel: for each query row delta = dO . O, lse and dlse, for this kernel and, as the
// non-finite fallback, the portable one. Also zeroes dQ's sums.
//
// A thread block takes one query block of one head. A warp takes 16 of its rows and waits only for those. delta is the
// diagonal of dO O^T, computed by the same products as dP = dO V^T. So the two cancel exactly where a query sees one
// key. Bound by memory.
#pragma once

#include "cuda/hopper/backward_args.h"
#include "cuda/portable/backward_shared.cuh"

namespace anyflash::cuda {

template <class E, int kDepth>
class PrepareBlock {
 public:
  static constexpr int kPart = kDepth < 128 ? kDepth : 128;  ///< channels of one chain of products (products.cuh)
  static constexpr int kStride = kPart + 8;

  struct Shared {
    alignas(16) E rows[2][64 * kStride];  ///< dO, O
    float delta[64];
    double sink[64];
    std::uint32_t live[4], large_lse[4];  ///< of each warp's rows
  };

  __device__ __forceinline__ PrepareBlock(const GroupBackwardArgs& args, Shared& shared)
      : args_(args), shared_(shared), index_(static_cast<std::int32_t>(gridDim.x - 1 - blockIdx.x)) {
    const auto& side = args.sides[queries];
    const auto head = index_ / side.blocks;
    block_ = index_ - head * side.blocks;
    b_ = head / side.heads, h_ = head - b_ * side.heads;
  }

  __device__ __forceinline__ void run() {
    if (index_ == 0 && threadIdx.x == 0) *args_.not_finite = 0, *args_.next_task = 0, *args_.terms.any_large_lse = 0;
    load(0);
    auto* const sums = reinterpret_cast<float4*>(args_.sums + index_ * std::int64_t{64 * kDepth});
#pragma unroll
    for (int i = 0; i < 16 * kDepth; i += 128) sums[i + threadIdx.x] = float4{0, 0, 0, 0};
    find_row();
    float delta[2];
    multiply(delta);
    if constexpr (kDepth > kPart) {
      __syncwarp();
      load(kPart);
      float rest[2];
      multiply(rest);
      delta[0] += rest[0], delta[1] += rest[1];
    }
    const unsigned lane = lane_number();
    if (lane % 4 == lane / 8) {  // on the diagonal
      shared_.delta[first_row() + lane / 4] = delta[0];
      shared_.delta[first_row() + lane / 4 + 8] = delta[1];
    }
    __syncwarp();
    store();
    __syncthreads();
    if (threadIdx.x == 0) store_block();
  }

 private:
  __device__ __forceinline__ static int first_row() { return static_cast<int>(threadIdx.x / 32 * 16); }
  __device__ __forceinline__ BlockRows rows() const {
    const auto& side = args_.sides[queries];
    return {box_of(side.grid, side.plain, block_), side.grid.size, first_row()};
  }

  /// Loads this warp's rows of dO and O, from a channel on.
  __device__ __forceinline__ void load(int first_channel) {
    const auto places = rows();
    load(shared_.rows[0], args_.sides[queries].rows[1], places, first_channel);
    load(shared_.rows[1], args_.out, places, first_channel);
    copies_commit();
  }
  __device__ __forceinline__ void load(E* to, const Rows& from, const BlockRows& places, int first_channel) const {
    constexpr int kChunks = kPart / 8, kStep = 32 / kChunks;  // a lane copies the same channels of every kStep-th row
    const E* const data = head_data<E>(from, b_, h_) + first_channel * from.channel;
    const int channel = static_cast<int>(lane_number()) % kChunks * 8;
    const int wanted = min(max(args_.channels[1] - first_channel - channel, 0), 8);
    int row = static_cast<int>(lane_number()) / kChunks;
    E* place = to + (first_row() + row) * kStride + channel;
    const auto& side = args_.sides[queries];
    const auto first = block_ * std::int64_t{64} + first_row();
    if (side.plain && from.vectors && first + 16 <= side.grid.size[2]) {
      const E* row_at = data + (first + row) * from.sequence[2] + (wanted > 0 ? channel : 0);
#pragma unroll
      for (int i = 0; i < 16 / kStep; ++i, place += kStep * kStride, row_at += kStep * from.sequence[2])
        copy_16(place, row_at, wanted * int(sizeof(E)));
      return;
    }
#pragma unroll 1
    for (; row < 16; row += kStep, place += kStep * kStride) {
      std::int64_t at;
      const int here = places.find(from, row, at) ? wanted : 0;
      if (from.vectors) {
        copy_16(place, here > 0 ? data + at + channel : data, here * int(sizeof(E)));
      } else {
        for (int n = 0; n < 8; ++n) place[n] = n < here ? data[at + (channel + n) * from.channel] : zero<E>();
      }
    }
  }

  /// The row terms of the row that this lane stores, if it is one of the first 16.
  __device__ __forceinline__ void find_row() {
    exists_ = false, lse_ = dlse_ = 0;
    Int3 c;
    if (lane_number() >= 16 || !rows().coordinate(static_cast<int>(lane_number()), c)) return;
    exists_ = true;
    const auto query = rules::flat_index(c, args_.sides[queries].grid.size);
    const auto read = [&](const Numbers& of) {
      return reinterpret_cast<const float*>(of.data)[b_ * of.batch + h_ * of.head + query * of.query];
    };
    const BackwardArgs& given = args_;
    lse_ = read(given.lse);
    if (given.dlse.data) dlse_ = read(given.dlse);
  }

  /// dO . O of this lane's two rows, if they are on the diagonal.
  __device__ __forceinline__ void multiply(float (&delta)[2]) {
    copies_wait<0>();
    __syncwarp();
    const unsigned lane = lane_number();
    const E* const a_from = shared_.rows[0] + (first_row() + lane % 16) * kStride + lane / 16 * 8;
    const E* const b_from = shared_.rows[1] + (first_row() + lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
    float low[2][2] = {}, high[2][2] = {};
#pragma unroll
    for (int c = 0; c < kPart; c += 16) {
      std::uint32_t a[4], b[4];
      load_matrices(a, a_from + c);
      load_matrices(b, b_from + c);
      multiply_16(low[0], low[1], a, b[0], b[1], E());
      multiply_16(high[0], high[1], a, b[2], b[3], E());
    }
    const unsigned odd = lane / 4 % 2;
    delta[0] = odd ? low[0][1] : low[0][0];
    delta[1] = odd ? high[1][1] : high[1][0];
  }

  __device__ __forceinline__ void store() {
    const unsigned lane = lane_number();
    const bool live = exists_ && lse_ != __int_as_float(0xff800000);
    const auto all = __ballot_sync(0xffffffffu, live);
    const auto large_lse = __ballot_sync(0xffffffffu, live && fabsf(lse_) >= kLargeLse<E>);
    if (lane == 0) shared_.live[threadIdx.x / 32] = all, shared_.large_lse[threadIdx.x / 32] = large_lse;
    if (lane >= 16) return;
    const int row = first_row() + static_cast<int>(lane);
    const float delta = shared_.delta[row], dlse = live ? dlse_ : 0.0f;
    double sink = 0;
    if (live && args_.terms.sink) {
      const auto logit = read_number<float>(args_.sink, h_ * args_.sink.head);
      sink = exp(double(logit) - double(lse_)) * (double(dlse) - double(delta));
    }
    shared_.sink[row] = sink;
    const auto at = index_ * std::int64_t{64} + row;
    static_cast<float*>(args_.terms.lse)[at] = live ? lse_ : 0.0f;
    static_cast<float*>(args_.terms.delta)[at] = delta;
    static_cast<float*>(args_.terms.dlse)[at] = dlse;
    static_cast<float*>(args_.terms.rest)[at] = 0;
    if (blockIdx.x == 0) static_cast<float*>(args_.terms.rest)[at + 64] = 0;
    args_.lse[at] = live ? lse_ : __int_as_float(0x7f800000);
    args_.delta[at] = live ? delta : 0.0f;
    args_.dlse[at] = dlse;
  }

  __device__ __forceinline__ void store_block() {
    std::uint64_t live = 0, large_lse = 0;
    for (int warp = 0; warp < 4; ++warp) {
      live |= std::uint64_t{shared_.live[warp]} << 16 * warp;
      large_lse |= std::uint64_t{shared_.large_lse[warp]} << 16 * warp;
    }
    args_.terms.live[index_] = live, args_.terms.large_lse[index_] = large_lse;
    if (!args_.terms.sink) return;
    double sum = 0;
    for (int row = 0; row < 64; ++row) sum += shared_.sink[row];
    args_.terms.sink[index_] = sum;
  }

  const GroupBackwardArgs& args_;
  Shared& shared_;
  const std::int32_t index_;  ///< of the query block among all; last ones first, so that the first are in L2
                              ///< when the next kernel begins with them
  std::int32_t b_, h_, block_;
  bool exists_;
  float lse_, dlse_;
};

template <class E, int kDepth>
__global__ void __launch_bounds__(128) prepare_rows(const __grid_constant__ GroupBackwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Block = PrepareBlock<E, kDepth>;
  __shared__ typename Block::Shared shared;
  Block(args, shared).run();
#else
  __trap();  // never launched: the host asks no other GPU for it
#endif
}

}  // namespace anyflash::cuda
