// What the tests of the kernels' pieces share: random numbers in aligned memory, and a walk over the instruction sets.
#pragma once

#include <cstdint>
#include <random>

#include <gtest/gtest.h>

#include "cpu/workspace.h"
#include "hwy/aligned_allocator.h"
#include "hwy/targets.h"

namespace anyflash::cpu {

template <class T>
struct Matrix {
  std::int64_t rows, cols;
  hwy::AlignedFreeUniquePtr<T[]> data;
  Matrix(std::int64_t rows, std::int64_t cols, unsigned seed) : rows(rows), cols(cols), data(allocate<T>(rows * cols)) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    for (std::int64_t i = 0; i < rows * cols; ++i) data[i] = static_cast<T>(normal(random));
  }
};

/// Runs a check on every instruction set that was compiled in and runs here: `targets` are the caller's HWY_TARGETS.
template <class Check>
void on_every_set(std::int64_t targets, const Check& check) {
  for (auto rest = hwy::SupportedTargets() & targets; rest != 0; rest &= rest - 1) {
    const auto target = rest & -rest;
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(target);
    check();
    hwy::SetSupportedTargetsForTest(0);
  }
}

}  // namespace anyflash::cpu
