// Rung 7: 16-byte loads and stores.
//
// Changed: a thread reads four neighbouring numbers at once. A warp then asks for 512 bytes by one instruction, a
// quarter of the instructions, and more bytes are on their way at any time. Rows that do not begin at a multiple of 16
// bytes (a number of columns that 4 does not divide) go by single numbers: one kernel template, two instances.
// Expected: nearer to the memory's bandwidth. 1024 x 1024 numbers lie in L2, and times differ from run to run on the
// same kind of card. Rungs 6, 7 and 8 took 4.3, 4.1 and 4.0 us in one, 4.6, 5.8 and 4.5 in the next. Why is not known.
// Measured (NVIDIA H200): 1024 x 1024 4.84; 4096 x 4096 37.3 us.
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

// Numbers that are loaded and stored by one instruction.
template <int count>
struct alignas(4 * count) Vector {
  float x[count];
};

template <int count>
__global__ void softmax(Softmax p) {
  float* const shared = shared_memory<float>();
  const auto* x = reinterpret_cast<const Vector<count>*>(p.x + std::size_t(blockIdx.x) * p.columns);
  auto* y = reinterpret_cast<Vector<count>*>(p.y + std::size_t(blockIdx.x) * p.columns);
  const int vectors = p.columns / count;
  float largest = -INFINITY, sum = 0;
  for (int j = threadIdx.x; j < vectors; j += kThreads) {
    const Vector<count> now = x[j];
#pragma unroll
    for (int n = 0; n < count; ++n) largest = fmaxf(largest, now.x[n]);
  }
  largest = reduce(largest, shared, [](float a, float b) { return fmaxf(a, b); });
  for (int j = threadIdx.x; j < vectors; j += kThreads) {
    const Vector<count> now = x[j];
#pragma unroll
    for (int n = 0; n < count; ++n) sum += expf(now.x[n] - largest);
  }
  sum = reduce(sum, shared, [](float a, float b) { return a + b; });
  for (int j = threadIdx.x; j < vectors; j += kThreads) {
    Vector<count> now = x[j];
#pragma unroll
    for (int n = 0; n < count; ++n) now.x[n] = expf(now.x[n] - largest) / sum;
    y[j] = now;
  }
}

}  // namespace

extern "C" void rung(const Softmax* p) {
  launch(p->columns % 4 ? softmax<1> : softmax<4>, p->rows, kThreads, kWarps * sizeof(float), *p);
}
