// Errors of the CUDA runtime as the library's own.
#pragma once

#include <anyflash/tensor.h>
#include <cuda_runtime_api.h>

#include <string>

namespace anyflash::cuda {

/// Throws Error if a call of the runtime failed: "cuda: <what> failed: <the runtime's words>".
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the next call is to start afresh
  const auto kind = status == cudaErrorMemoryAllocation ? Error::Kind::memory : Error::Kind::device;
  throw Error(kind, std::string("cuda: ") + what + " failed: " + cudaGetErrorString(status));
}

/// Of calls that give something back, of which nobody is told if they fail: nor is whoever asks for the last error.
inline void give_back(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
}

}  // namespace anyflash::cuda
