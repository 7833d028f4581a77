// A pipeline of shared-memory tiles that a producer fills by TMA and consumer warps read: kStages tiles, each with a
// full and an empty mbarrier.
#pragma once

#include "cuda/tile/barriers.cuh"

namespace anyflash::cuda {

/// The stage and phase of a producer or a consumer.
template <int kStages>
struct PipelineState {
  int stage = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

template <int kStages>
struct Pipeline {
  using State = PipelineState<kStages>;
  Barrier full[kStages], empty[kStages];

  /// Called by one thread, before a barrier of the thread block.
  __device__ __forceinline__ void init(int consumer_warps, int producers = 1) {
    for (int i = 0; i < kStages; ++i) full[i].begin(producers), empty[i].begin_for_warps(consumer_warps);
  }
  __device__ __forceinline__ void wait_full(State at) { full[at.stage].wait(at.phase); }
  __device__ __forceinline__ void wait_empty(State at) { empty[at.stage].wait(at.phase ^ 1); }
  /// Called by a whole warp, once all its reads of the tile are done.
  __device__ __forceinline__ void release(State at) { cuda::release(empty[at.stage]); }
};

/// The order in which warpgroups issue their products: while one has the tensor cores, the next computes exponentials.
/// A ring of named barriers, one per warpgroup, from `first` on. kWarpgroups 0: no order.
template <int kWarpgroups, int kFirst>
struct IssueOrder {
  __device__ __forceinline__ static void init(unsigned warpgroup) {
    if (kWarpgroups > 0 && warpgroup == 0) arrive_threads<256>(kFirst);
  }
  __device__ __forceinline__ static void wait_turn(unsigned warpgroup) {
    if constexpr (kWarpgroups > 0) sync_threads<256>(kFirst + warpgroup);
  }
  __device__ __forceinline__ static void pass_turn(unsigned warpgroup) {
    if constexpr (kWarpgroups > 0) arrive_threads<256>(kFirst + (warpgroup + 1 == kWarpgroups ? 0 : warpgroup + 1));
  }
  /// The first warpgroup consumes the last turn, which no other warpgroup waits for.
  __device__ __forceinline__ static void finish(unsigned warpgroup) {
    if (kWarpgroups > 0 && warpgroup == 0) wait_turn(0);
  }
};

}  // namespace anyflash::cuda
