// Tensors in the first GPU's memory, for tests.
#pragma once

#include <anyflash/attention.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

namespace anyflash {

constexpr Device gpu{DeviceKind::cuda, 0};

/// Number i of those that lie beside each other at `data`, as a double.
inline double number_at(ElementType type, const void* data, std::int64_t i) {
  const auto read = [&](auto number) {
    std::memcpy(&number, static_cast<const char*>(data) + i * std::int64_t{sizeof(number)}, sizeof(number));
    return number;
  };
  if (type == ElementType::float16) return double{__half2float(read(__half()))};
  if (type == ElementType::bfloat16) return double{__bfloat162float(read(__nv_bfloat16()))};
  return type == ElementType::float32 ? double{read(float())} : read(double());
}

/// So many numbers beside each other, of a sine wave that begins at `seed`.
inline std::vector<char> sines(ElementType type, std::int64_t count, double seed) {
  std::vector<char> bytes(static_cast<std::size_t>(count) * element_size(type));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto write = [&](auto number) {
      std::memcpy(&bytes[static_cast<std::size_t>(i) * sizeof(number)], &number, sizeof(number));
    };
    const double x = std::sin(seed + 1.7 * double(i));
    if (type == ElementType::float16) write(__float2half(static_cast<float>(x)));
    if (type == ElementType::bfloat16) write(__float2bfloat16(static_cast<float>(x)));
    if (type == ElementType::float32) write(static_cast<float>(x));
    if (type == ElementType::float64) write(x);
  }
  return bytes;
}

/// A tensor without gaps.
struct Tensor {
  TensorView view;

  /// Each of its bytes the same.
  Tensor(ElementType type, std::initializer_list<std::int64_t> shape, int byte) : Tensor(type, shape) {
    EXPECT_EQ(cudaMemset(view.data, byte, size()), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // calls may go to streams that do not wait for this one
  }
  /// Of such bytes.
  Tensor(ElementType type, std::initializer_list<std::int64_t> shape, const std::vector<char>& bytes)
      : Tensor(type, shape) {
    EXPECT_EQ(bytes.size(), size());
    EXPECT_EQ(cudaMemcpy(view.data, bytes.data(), size(), cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // such a copy may end after the call
  }
  /// Of the numbers of a sine wave that begins at `seed`: no two rows, heads or entries are alike.
  static Tensor of_sines(ElementType type, std::initializer_list<std::int64_t> shape, double seed) {
    return {type, shape, sines(type, TensorView(nullptr, type, shape).elements(), seed)};
  }

  std::vector<unsigned char> bytes() const {
    std::vector<unsigned char> found(size());
    EXPECT_EQ(cudaMemcpy(found.data(), view.data, size(), cudaMemcpyDeviceToHost), cudaSuccess);
    return found;
  }

 private:
  Tensor(ElementType type, std::initializer_list<std::int64_t> shape) : view(nullptr, type, shape, gpu) {
    EXPECT_EQ(cudaMalloc(&view.data, size()), cudaSuccess);
    memory_.reset(view.data);
  }
  std::size_t size() const { return static_cast<std::size_t>(view.elements()) * element_size(view.type); }

  std::unique_ptr<void, cudaError_t (*)(void*)> memory_{nullptr, &cudaFree};
};

}  // namespace anyflash
