// What learn/climb calls beside the rungs: memory of the GPU, copies, and times by events.
#include "device.h"

// Results are the CPU's address of new device memory, or of the card's name; errors end the process with one line.
extern "C" void* new_memory(std::size_t bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes + 256));
  return memory;
}
extern "C" void free_memory(void* memory) { check(cudaFree(memory)); }
extern "C" void copy(void* to, const void* from, std::size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}
extern "C" void prepare() {  // memory between kernels (DeviceArray) is kept from call to call
  cudaMemPool_t pool;
  std::uint64_t all = ~std::uint64_t(0);
  check(cudaDeviceGetDefaultMemPool(&pool, 0));
  check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all));
}
extern "C" const char* card() {
  static cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  return properties.name;
}
// 90 for compute capability 9.0.
extern "C" int capability() {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  return 10 * properties.major + properties.minor;
}
// Of one call, the mean of `calls` that follow each other.
extern "C" float milliseconds(void (*rung)(const void*), const void* arguments, int calls) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  check(cudaEventRecord(begin));
  for (int n = 0; n < calls; ++n) rung(arguments);
  check(cudaEventRecord(end));
  check(cudaEventSynchronize(end));
  float time = 0;
  check(cudaEventElapsedTime(&time, begin, end));
  check(cudaEventDestroy(begin));
  check(cudaEventDestroy(end));
  return time / calls;
}
