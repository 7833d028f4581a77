// Rung 6: reductions by warp shuffles.
//
// Changed: the 32 threads of a warp exchange registers directly. In a butterfly each lane takes over the number of the
// lane whose number differs in one bit; after 5 steps all lanes have the result. No memory, no barrier. Only the 8
// results of the warps go through shared memory: two barriers for a reduction, where rung 5 has ten.
// Expected: faster where rows are short and barriers count; nothing where memory is the limit. So it is.
// Measured (NVIDIA H200): 1024 x 1024 4.89; 4096 x 4096 39.6 us.
#include "device.h"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// join of the numbers of `lanes` neighbouring lanes, for all of them.
template <int lanes, class Join>
__device__ float reduce_lanes(float x, const Join& join) {
#pragma unroll
  for (int with = lanes / 2; with > 0; with /= 2) x = join(x, __shfl_xor_sync(~0u, x, with));
  return x;
}

template <class Join>
__device__ float reduce(float x, float* shared, const Join& join) {
  x = reduce_lanes<32>(x, join);
  __syncthreads();  // the reduction before has been read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return reduce_lanes<kWarps>(shared[threadIdx.x % kWarps], join);
}

__global__ void softmax(Softmax p) {
  __shared__ float shared[kWarps];
  const float* x = p.x + std::size_t(blockIdx.x) * p.columns;
  float* y = p.y + std::size_t(blockIdx.x) * p.columns;
  float largest = -INFINITY, sum = 0;
  for (int j = threadIdx.x; j < p.columns; j += kThreads) largest = fmaxf(largest, x[j]);
  largest = reduce(largest, shared, [](float a, float b) { return fmaxf(a, b); });
  for (int j = threadIdx.x; j < p.columns; j += kThreads) sum += expf(x[j] - largest);
  sum = reduce(sum, shared, [](float a, float b) { return a + b; });
  for (int j = threadIdx.x; j < p.columns; j += kThreads) y[j] = expf(x[j] - largest) / sum;
}

}  // namespace

extern "C" void rung(const Softmax* p) { launch(softmax, p->rows, kThreads, 0, *p); }
