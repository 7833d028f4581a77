// What every GPU rung shares: how to launch a kernel, memory for what lies between two kernels, and shared memory.
// nvcc compiles a rung for a GPU. g++ compiles the same text for the CPU, with emulator.h in the place of CUDA.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "../rung.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#include <cuda_runtime.h>

inline void check(cudaError_t status) {
  if (status != cudaSuccess) std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status)), std::exit(1);
}

// kernel<<<grid, block, shared_bytes>>>(arguments...). More than 48 KiB of shared memory must be asked for.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, int shared_bytes,
            std::type_identity_t<Parameters>... arguments) {
  if (grid.x * grid.y * grid.z == 0) return;
  if (shared_bytes > 48 << 10)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<grid, block, shared_bytes>>>(arguments...);
  check(cudaGetLastError());
}

// `count` numbers of device memory for the calls of this scope; what they are is not known.
template <class T>
struct DeviceArray {
  explicit DeviceArray(std::size_t count) { check(cudaMallocAsync(&data, count * sizeof(T) + 16, nullptr)); }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) {
    check(cudaMemcpy(data, from.data(), from.size() * sizeof(T), cudaMemcpyDefault));
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { check(cudaFreeAsync(data, nullptr)); }
  void clear(std::size_t count) const { check(cudaMemsetAsync(data, 0, count * sizeof(T), nullptr)); }
  std::vector<T> get(std::size_t count) const {
    std::vector<T> to(count);
    check(cudaMemcpy(to.data(), data, count * sizeof(T), cudaMemcpyDefault));
    return to;
  }
  T* data;
};

// The dynamic shared memory of a thread block. 1024: what TMA's and wgmma's swizzle wants.
template <class T>
__device__ __forceinline__ T* shared_memory() {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  return reinterpret_cast<T*>(shared_bytes);
}
#else
#include "emulator.h"
#endif

__host__ __device__ constexpr int blocks_of(int count, int size) { return (count + size - 1) / size; }
