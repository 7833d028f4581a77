// A tensor on the CPU and its twin on the first GPU, of the same numbers, for calls that must give the same on both.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "tensor.h"

namespace anyflash {

/// Of float64, float32 or bfloat16. Laid out row by row, backwards along the axes whose bits are set in `flipped` (bit
/// 0: the first axis).
struct Twins {
  TensorView cpu, cuda;

  /// Numbers of a sine wave that begins at `seed`; zeros where it is negative.
  Twins(ElementType type, std::initializer_list<std::int64_t> shape, double seed, unsigned flipped = 0)
      : cpu(nullptr, type, shape), on_gpu_(type, shape, 0) {
    EXPECT_NE(type, ElementType::float16);
    const auto count = cpu.elements();
    const auto size = static_cast<std::int64_t>(element_size(type));
    host_.resize(static_cast<std::size_t>(count * size));
    for (std::int64_t i = 0; i < count; ++i) store(i, seed < 0 ? 0 : std::sin(seed + 1.7 * double(i)));
    std::int64_t first = 0;
    for (int axis = 0; axis < cpu.rank; ++axis) {
      if (!(flipped >> axis & 1)) continue;
      first += (cpu.shape[axis] - 1) * cpu.strides[axis];
      cpu.strides[axis] *= -1;
    }
    EXPECT_EQ(cudaMemcpy(on_gpu_.view.data, host_.data(), host_.size(), cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);  // such a copy may end after the call
    cuda = cpu;
    cuda.device = gpu;
    cuda.data = static_cast<char*>(on_gpu_.view.data) + first * size;
    cpu.data = host_.data() + first * size;
  }

  /// Results of a call on each: the same but for rounding.
  void expect_equal(const char* name) const {
    const auto found = on_gpu_.bytes();
    const bool narrow = element_size(cpu.type) == 2;
    const double tolerance = cpu.type == ElementType::float64 ? 1e-12 : narrow ? 2e-2 : 1e-5;
    double worst = 0;
    for (std::int64_t i = 0; i < cpu.elements(); ++i) {
      const double mine = load(host_.data(), i), its = load(found.data(), i);
      const double error = mine == its ? 0 : std::fabs(mine - its) / (1 + std::fabs(mine));
      worst = std::isnan(error) ? INFINITY : std::fmax(worst, error);
    }
    EXPECT_LE(worst, tolerance) << name;
  }

 private:
  void store(std::int64_t i, double x) {
    if (cpu.type == ElementType::float64) {
      std::memcpy(&host_[i * 8], &x, 8);
      return;
    }
    const auto single = static_cast<float>(x);
    std::uint32_t bits;
    std::memcpy(&bits, &single, 4);
    if (cpu.type == ElementType::float32) std::memcpy(&host_[i * 4], &bits, 4);
    const auto upper = static_cast<std::uint16_t>(bits >> 16);
    if (cpu.type == ElementType::bfloat16) std::memcpy(&host_[i * 2], &upper, 2);
  }
  template <class Byte>
  double load(const Byte* data, std::int64_t i) const {
    double wide;
    if (cpu.type == ElementType::float64) return std::memcpy(&wide, data + i * 8, 8), wide;
    std::uint32_t bits = 0;
    if (cpu.type == ElementType::float32) {
      std::memcpy(&bits, data + i * 4, 4);
    } else {
      std::uint16_t upper;
      std::memcpy(&upper, data + i * 2, 2);
      bits = std::uint32_t{upper} << 16;
    }
    float single;
    std::memcpy(&single, &bits, 4);
    return single;
  }

  std::vector<char> host_;
  Tensor on_gpu_;
};

}  // namespace anyflash
