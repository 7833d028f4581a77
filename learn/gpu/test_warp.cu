// Test of device functions: a warp's reductions by shuffles.
//
// A device function has no main. So a kernel of one warp calls it, and each lane writes what it got. The check runs on
// the CPU and is as plain as can be. A butterfly must give every lane the result: lane 0 alone is not enough.
#include "device.h"

namespace {

__device__ float warp_max(float x) {
  for (int with = 16; with > 0; with /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, with));
  return x;
}
__device__ float quad_sum(float x) {  // of the four lanes that share a row of an mma's result
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

__global__ void try_all(const float* x, float* largest, float* sum) {
  largest[threadIdx.x] = warp_max(x[threadIdx.x]);
  sum[threadIdx.x] = quad_sum(x[threadIdx.x]);
}

}  // namespace

extern "C" const char* test() {
  std::vector<float> x(32);
  for (int n = 0; n < 32; ++n) x[n] = float(n * 11 % 32) - 40;  // the largest is -9, somewhere in the middle
  const DeviceArray<float> given(x), largest(32), sum(32);
  launch(try_all, 1, 32, 0, given.data, largest.data, sum.data);
  const auto got_largest = largest.get(32), got_sum = sum.get(32);
  for (int n = 0; n < 32; ++n) {
    const float* quad = &x[n / 4 * 4];
    if (got_largest[n] != -9) return "warp_max: a lane does not have the maximum";
    if (got_sum[n] != quad[0] + quad[1] + quad[2] + quad[3]) return "quad_sum: a lane does not have its quad's sum";
  }
  return nullptr;
}
