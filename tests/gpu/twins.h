// A tensor on the CPU and its twin on the first GPU, of the same numbers, for calls that must give the same on both.
#pragma once

#include <cmath>
#include <vector>

#include "tensor.h"

namespace anyflash {

/// Laid out row by row, backwards along the axes whose bits are set in `flipped` (bit 0: the first axis).
struct Twins {
  TensorView cpu, cuda;

  /// Numbers of a sine wave that begins at `seed`; zeros where it is negative.
  Twins(ElementType type, std::initializer_list<std::int64_t> shape, double seed, unsigned flipped = 0)
      : cpu(nullptr, type, shape), host_(numbers(cpu, seed)), on_gpu_(type, shape, host_) {
    const auto size = static_cast<std::int64_t>(element_size(type));
    std::int64_t first = 0;
    for (int axis = 0; axis < cpu.rank; ++axis) {
      if (!(flipped >> axis & 1)) continue;
      first += (cpu.shape[axis] - 1) * cpu.strides[axis];
      cpu.strides[axis] *= -1;
    }
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
      const double mine = number_at(cpu.type, host_.data(), i), its = number_at(cpu.type, found.data(), i);
      const double error = mine == its ? 0 : std::fabs(mine - its) / (1 + std::fabs(mine));
      worst = std::isnan(error) ? INFINITY : std::fmax(worst, error);
    }
    EXPECT_LE(worst, tolerance) << name;
  }

 private:
  static std::vector<char> numbers(const TensorView& view, double seed) {
    if (seed >= 0) return sines(view.type, view.elements(), seed);
    return std::vector<char>(static_cast<std::size_t>(view.elements()) * element_size(view.type));
  }

  std::vector<char> host_;
  Tensor on_gpu_;
};

}  // namespace anyflash
