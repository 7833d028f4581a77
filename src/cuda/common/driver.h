// Functions of the CUDA driver, found through the runtime. Nothing is linked with the driver's library, so that
// programs start without a driver.
#pragma once

#include <cuda_runtime_api.h>

namespace anyflash::cuda {

/// Null if the driver has no such function. decltype(&name), of <cuda.h>, as CUDA 12.0 has it.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  const auto status = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else
  const auto status = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
  if (status != cudaSuccess) cudaGetLastError();
  return reinterpret_cast<Function>(status == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr);
}

}  // namespace anyflash::cuda
