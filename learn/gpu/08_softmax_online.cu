// Rung 8: the online softmax, and one read.
//
// Changed: a row is read once and stays in registers: up to 32 numbers for each of 128, 256 or 512 threads. Maximum and
// sum are found together (Milakov and Gimelshein, 2018): a thread has m and l of its numbers, and two pairs join by
//   m = max(m1, m2),   l = l1 exp(m1 - m) + l2 exp(m2 - m).
// So one reduction does for two. exp is exp2 of a number times log2(e), which is what the hardware has, and the division
// is one for the row. Rows that are too long for the registers are read twice.
// Expected: the memory's bandwidth, 8 bytes a number, as torch.softmax; for short rows a little better. 1024 x 1024
// numbers lie in the L2 cache from call to call. Whether one read instead of three gains there differs from run to run
// (rung 7). torch's time is of a Python loop of 20 calls, which at 1024 x 1024 may be the time of the launches.
// Measured (NVIDIA H200): 1024 x 1024 4.52; 4096 x 4096 35.5 us.
#include "device.h"

namespace {

constexpr float kLog2e = 1.44269504f;
constexpr int kHeld = 8;  // vectors of a thread that stay in registers

// The largest number times log2(e), and the sum of the exponentials below it.
struct State {
  float m = -INFINITY, l = 0;
};

__device__ __forceinline__ State join(State a, State b) {
  const float m = fmaxf(a.m, b.m);
  if (m == -INFINITY) return {};
  return {m, a.l * exp2f(a.m - m) + b.l * exp2f(b.m - m)};
}

template <int lanes>
__device__ __forceinline__ State join_lanes(State x) {
#pragma unroll
  for (int with = lanes / 2; with > 0; with /= 2)
    x = join(x, {__shfl_xor_sync(~0u, x.m, with), __shfl_xor_sync(~0u, x.l, with)});
  return x;
}

template <int count>
struct alignas(4 * count) Vector {
  float x[count];
};

template <int count>
__device__ __forceinline__ void add(State& state, const Vector<count>& now) {
  float largest = state.m;
#pragma unroll
  for (int n = 0; n < count; ++n) largest = fmaxf(largest, now.x[n] * kLog2e);
  if (largest == -INFINITY) return;
  state.l *= exp2f(state.m - largest), state.m = largest;
#pragma unroll
  for (int n = 0; n < count; ++n) state.l += exp2f(fmaf(now.x[n], kLog2e, -largest));
}

template <int count, int threads>
__global__ void __launch_bounds__(threads) softmax(Softmax p) {
  State* const shared = shared_memory<State>();
  const auto* x = reinterpret_cast<const Vector<count>*>(p.x + std::size_t(blockIdx.x) * p.columns);
  auto* y = reinterpret_cast<Vector<count>*>(p.y + std::size_t(blockIdx.x) * p.columns);
  const int vectors = p.columns / count;
  Vector<count> held[kHeld];
  State state;
#pragma unroll
  for (int n = 0; n < kHeld; ++n)
    if (const int j = threadIdx.x + n * threads; j < vectors) held[n] = x[j];
#pragma unroll
  for (int n = 0; n < kHeld; ++n)
    if (int(threadIdx.x) + n * threads < vectors) add(state, held[n]);
  for (int j = threadIdx.x + kHeld * threads; j < vectors; j += threads) add(state, x[j]);
  state = join_lanes<32>(state);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = state;
  __syncthreads();
  state = join_lanes<threads / 32>(shared[threadIdx.x % (threads / 32)]);
  const float factor = 1 / state.l;
  const auto store = [&](Vector<count> now, int j) {
#pragma unroll
    for (int n = 0; n < count; ++n) now.x[n] = exp2f(fmaf(now.x[n], kLog2e, -state.m)) * factor;
    y[j] = now;
  };
#pragma unroll
  for (int n = 0; n < kHeld; ++n)
    if (const int j = threadIdx.x + n * threads; j < vectors) store(held[n], j);
  for (int j = threadIdx.x + kHeld * threads; j < vectors; j += threads) store(x[j], j);
}

template <int count>
void launch_for(const Softmax& p) {
  const int shared = 32 * sizeof(State);
  if (p.columns <= 128 * 2 * count) return launch(softmax<count, 128>, p.rows, 128, shared, p);
  if (p.columns <= 256 * 8 * count) return launch(softmax<count, 256>, p.rows, 256, shared, p);
  launch(softmax<count, 512>, p.rows, 512, shared, p);
}

}  // namespace

extern "C" void rung(const Softmax* p) { p->columns % 4 ? launch_for<1>(*p) : launch_for<4>(*p); }
