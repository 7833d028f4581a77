// Errors of the CUDA runtime as the library's own.
#pragma once

#include <anyflash/tensor.h>
#include <cuda_runtime_api.h>

#include <string>

namespace anyflash::cuda {

/// Throws Error if a call of the runtime failed: "cuda: <what> failed: <the runtime's words>".
inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error for the next call
  const auto kind = status == cudaErrorMemoryAllocation ? Error::Kind::memory : Error::Kind::device;
  throw Error(kind, std::string("cuda: ") + what + " failed: " + cudaGetErrorString(status));
}

/// For calls that release something: their errors are dropped, and cleared from cudaGetLastError.
inline void give_back(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
}

}  // namespace anyflash::cuda
