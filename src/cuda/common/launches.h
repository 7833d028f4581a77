// Launches of kernels with a plain grid. <<<>>> is not used: its errors are reported by cudaGetLastError, which also
// reports earlier errors of other code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/errors.h"

namespace anyflash::cuda {

template <class... Args>
void launch_plainly(void (*kernel)(Args...), std::int64_t blocks, std::int64_t threads, cudaStream_t stream,
                    std::type_identity_t<Args>... args) {
  void* parameters[] = {&args...};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
                         dim3(static_cast<unsigned>(threads)), parameters, 0, stream),
        "launching a kernel");
}

}  // namespace anyflash::cuda
