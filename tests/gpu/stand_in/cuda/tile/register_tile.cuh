// Stands in for src/cuda/tile/register_tile.cuh where no GPU is: what lazy_softmax.cuh needs, for four lanes that share a
// row, each a thread of the CPU.
#pragma once

#include <math.h>

#include <barrier>

#define __device__
#define __forceinline__ inline

namespace anyflash::cuda {

inline thread_local unsigned lane = 0;
inline std::barrier all_lanes(4);

inline unsigned lane_number() { return lane; }

/// What lane `from` gives.
inline float exchanged(float own, unsigned from) {
  static float given[4];
  given[lane] = own;
  all_lanes.arrive_and_wait();
  const float found = given[from];
  all_lanes.arrive_and_wait();
  return found;
}
inline float __shfl_xor_sync(unsigned, float x, unsigned distance) { return exchanged(x, lane ^ distance); }
inline bool __any_sync(unsigned, bool x) {
  bool any = false;
  for (unsigned from = 0; from < 4; ++from) any |= exchanged(x, from) != 0;
  return any;
}
inline float exp2_approximately(float x) { return x < -126 ? 0.0f : exp2f(x); }  // no subnormal results
inline float __log2f(float x) { return log2f(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }

template <int kCols>
struct AccumulatorTile {
  static constexpr int kPerRow = kCols / 4;
  float x[kPerRow / 2][4];

  float& at(int row, int column) { return x[column / 2][2 * row + column % 2]; }
};

}  // namespace anyflash::cuda
