// Tensors in the first GPU's memory, for tests.
#pragma once

#include <anyflash/attention.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

namespace anyflash {

constexpr Device gpu{DeviceKind::cuda, 0};

/// A tensor without gaps, each of its bytes the same.
struct Tensor {
  TensorView view;

  Tensor(ElementType type, std::initializer_list<std::int64_t> shape, int byte) : view(nullptr, type, shape, gpu) {
    EXPECT_EQ(cudaMalloc(&view.data, size()), cudaSuccess);
    memory_.reset(view.data);
    EXPECT_EQ(cudaMemset(view.data, byte, size()), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // calls may go to streams that do not wait for this one
  }

  std::vector<unsigned char> bytes() const {
    std::vector<unsigned char> found(size());
    EXPECT_EQ(cudaMemcpy(found.data(), view.data, size(), cudaMemcpyDeviceToHost), cudaSuccess);
    return found;
  }

 private:
  std::size_t size() const { return static_cast<std::size_t>(view.elements()) * element_size(view.type); }

  std::unique_ptr<void, cudaError_t (*)(void*)> memory_{nullptr, &cudaFree};
};

}  // namespace anyflash
