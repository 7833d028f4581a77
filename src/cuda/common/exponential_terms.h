// The scale's terms for kernels that compute many exponentials of scores (exponential.cuh).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace anyflash::cuda {

/// exp(factor x): the terms that do not depend on x, computed on the host.
struct ScaledExponentialTerms {
  double steps, step, step_low;  ///< x is n steps of ln 2 / 32 / factor, a sum of two numbers, and a remainder r
  double share[6];               ///< (exp(factor r) - 1) / r
  unsigned limit;  ///< upper half of the lowest x whose exponential is not 0, just above the end of the normal numbers

  ScaledExponentialTerms() = default;
  explicit ScaledExponentialTerms(double factor) {
    constexpr double ln2 = 0x1.62e42fefa39efp-1, ln2_low = 0x1.abc9e3b39803fp-56;
    steps = factor * (32 / ln2), step = ln2 / 32 / factor;
    step_low = (std::fma(-step, factor, ln2 / 32) + ln2_low / 32) / factor;
    double power = 1;
    for (int n = 0; n < 6; ++n) power *= factor / (n + 1), share[n] = power;
    const double lowest = -708.385 / factor;
    std::uint64_t bits;
    std::memcpy(&bits, &lowest, 8);
    limit = static_cast<unsigned>(bits >> 32);
  }
  /// Are all terms normal numbers, with a margin for the results of arithmetic on them?
  static bool bear(double factor) { return factor > 0x1p-60 && factor < 0x1p60; }
};

}  // namespace anyflash::cuda
