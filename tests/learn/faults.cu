// Kernels with one mistake each. The emulator must report it in one line, or the result must be wrong: test_gpu.py.
#include "../../learn/gpu/ptx.h"

namespace {

__global__ void divergence(float* to) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  to[threadIdx.x] = 1;
}

__global__ void absent_threads(float* to) {
  if (threadIdx.x >= 32) return;
  __syncthreads();
  to[threadIdx.x] = 1;
}

__global__ void absent_lanes(float* to) {
  if (threadIdx.x % 32 < 16) to[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
}

__global__ void different_instructions(float* to) {
  if (threadIdx.x % 2) to[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
  else __syncwarp();
}

__global__ void misaligned(float* to) {
  float* const shared = shared_memory<float>();
  shared[threadIdx.x] = 1;
  to[threadIdx.x] = reinterpret_cast<const float4*>(shared + 1)->x;
}

__global__ void beyond_shared_memory(float* to) {
  shared_memory<float>()[32768 / 4 + threadIdx.x] = 1;
  to[threadIdx.x] = 1;
}

__global__ void beyond_an_array(float* to) {
  __shared__ float shared[64];
  for (unsigned n = 0; n <= threadIdx.x + 8; ++n) shared[n] = 1;
  to[threadIdx.x] = shared[threadIdx.x];
}

// Reversed through shared memory, without a barrier.
__global__ void no_barrier(float* to) {
  __shared__ float shared[64];
  shared[threadIdx.x] = 1;
  to[threadIdx.x] = shared[63 - threadIdx.x];
}

// Of each warpgroup alone, in the place of one for both.
__global__ void no_barrier_between_warpgroups(float* to) {
  __shared__ float shared[256];
  shared[threadIdx.x] = 1;
  named_sync(int(1 + threadIdx.x / 128), 128);
  if (threadIdx.x < 64) to[threadIdx.x] = shared[255 - threadIdx.x];
}

__global__ void bulk_add_without_a_wait(float* to) {
  float* const shared = shared_memory<float>();
  shared[threadIdx.x] = 1;
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) bulk_add(to, shared, 64);
}

__global__ void unwritten(float* to) {
  std::uint32_t x[4];
  ldmatrix(x, shared_memory<half>() + threadIdx.x * 8);
  to[threadIdx.x] = float(x[0]);
}

__global__ void no_wait(float* to) {
  float* const shared = shared_memory<float>();
  copy_async(shared + threadIdx.x * 4, to, true);
  copies_commit();
  to[threadIdx.x] = shared[threadIdx.x * 4];
  copies_wait<0>();
}

__global__ void never_waits(float* to) {
  copy_async(shared_memory<float>() + threadIdx.x * 4, to, true);
  copies_commit();
}

__global__ void barrier_not_initialized(float*) { shared_memory<Barrier>()->wait(0); }

__global__ void too_many_arrivals(float*) {
  Barrier& barrier = *shared_memory<Barrier>();
  if (threadIdx.x > 0) return;
  barrier.init(1);
  barrier.arrive_expect(128);
  barrier.arrive();
}

__global__ void bytes_that_never_come(float* to) {
  Barrier& barrier = *shared_memory<Barrier>();
  if (threadIdx.x == 0) barrier.init(1), barrier.arrive_expect(128);
  __syncthreads();
  barrier.wait(0);
  to[threadIdx.x] = 1;
}

__global__ void nobody_waits(float* to) {
  to[threadIdx.x] = 1;
  if (threadIdx.x < 32) named_arrive(1, 64);
}

__global__ void no_barrier_fence(float*, const __grid_constant__ CUtensorMap map) {
  Barrier& barrier = *reinterpret_cast<Barrier*>(shared_memory<half>() + 1024);
  if (threadIdx.x > 0) return;
  barrier.init(1);
  barrier.arrive_expect(2048);
  tma_load(shared_memory<half>(), map, barrier, 0, 0, 0);
  barrier.wait(0);
}

// 128 threads: a product of two tiles of ones, 64 x 64, with one mistake.
struct Tiles {
  half a[64 * 64], b[64 * 64];
};
__device__ void fill(Tiles& tiles) {
  for (int n = threadIdx.x; n < 64 * 64; n += 128) tiles.a[n] = tiles.b[n] = __float2half(1);
}
__device__ void product(float* to, Tiles& tiles, bool fence, bool wait) {
  float c[8][4];
  if (fence) wgmma_fence();
  wgmma_abt(c, descriptor(tiles.a, 0), descriptor(tiles.b, 0), false);
  wgmma_commit();
  if (wait) wgmma_wait<0>(c);
  to[threadIdx.x % 64] = c[0][0] / 16;
  wgmma_wait<0>(c);
}
__global__ void no_proxy_fence(float* to) {
  Tiles& tiles = *shared_memory<Tiles>();
  fill(tiles);
  __syncthreads();
  product(to, tiles, true, true);
}
__global__ void no_wgmma_fence(float* to) {
  Tiles& tiles = *shared_memory<Tiles>();
  fill(tiles);
  fence_async_proxy();
  __syncthreads();
  product(to, tiles, false, true);
}
__global__ void result_before_the_wait(float* to) {
  Tiles& tiles = *shared_memory<Tiles>();
  fill(tiles);
  fence_async_proxy();
  __syncthreads();
  product(to, tiles, true, false);
}
__global__ void wgmma_without_a_mistake(float* to) {
  Tiles& tiles = *shared_memory<Tiles>();
  fill(tiles);
  fence_async_proxy();
  __syncthreads();
  product(to, tiles, true, true);
}
__global__ void without_a_mistake(float* to) {
  __shared__ float shared[64];
  shared[threadIdx.x] = 1;
  __syncthreads();
  to[threadIdx.x] = shared[63 - threadIdx.x];
}

}  // namespace

// Whether the kernel wrote 64 ones, in all of the emulator's orders.
bool is_right(void (*kernel)(float*), int threads) {
  bool right = true;
  for (int n = 0; n < 8; ++n) {
    const DeviceArray<float> to(std::vector<float>(64, NAN));
    launch(kernel, 1, threads, 32768, to.data);
    for (float x : to.get(64)) right &= x == 1;
  }
  return right;
}
#define FAULT(name, threads) \
  extern "C" bool fault_##name() { return is_right(name, threads); }
FAULT(divergence, 64)
FAULT(absent_threads, 64)
FAULT(absent_lanes, 64)
FAULT(different_instructions, 64)
FAULT(misaligned, 64)
FAULT(beyond_shared_memory, 64)
FAULT(beyond_an_array, 64)
FAULT(no_barrier, 64)
FAULT(no_barrier_between_warpgroups, 256)
FAULT(bulk_add_without_a_wait, 64)
FAULT(unwritten, 64)
FAULT(no_wait, 64)
FAULT(never_waits, 64)
FAULT(barrier_not_initialized, 64)
FAULT(too_many_arrivals, 64)
FAULT(bytes_that_never_come, 64)
extern "C" bool fault_nobody_waits() { return is_right(nobody_waits, 64) && emulator::error.empty(); }
extern "C" bool fault_no_barrier_fence() {
  const DeviceArray<half> from(16 * 64);
  launch(no_barrier_fence, 1, 64, 4096, nullptr, tensor_map(from.data, 1, 16, 64, 16));
  return emulator::error.empty();
}
FAULT(no_proxy_fence, 128)
FAULT(no_wgmma_fence, 128)
FAULT(result_before_the_wait, 128)
FAULT(wgmma_without_a_mistake, 128)
FAULT(without_a_mistake, 64)
