// A Hopper GPU for tests on machines that have none: what the CUDA run-time library would say of it.
#pragma once

#include <cuda_runtime_api.h>

extern "C" {
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  properties->major = 9, properties->multiProcessorCount = 132, properties->sharedMemPerBlockOptin = 227 << 10;
  return cudaSuccess;
}
}
