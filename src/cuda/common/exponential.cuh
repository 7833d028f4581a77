// exp of float64, for kernels that compute many at once besides products. CUDA's own function branches for tiny
// results, so that a thread's exponentials run one after the other, each a chain of 20 operations. float64 arithmetic
// also takes time from the tensor cores. This one has at most 13 operations and no branch: Tang 1989, with a table of
// 2^(i / 32), one number per lane.
#pragma once

#include "cuda/common/exponential_terms.h"
#include "cuda/common/instructions.cuh"

namespace anyflash::cuda {

/// 2^(i / 32) = high (1 + low).
// clang-format off
alignas(16) static __device__ const double kPowersOfTwo[32][2] = {
    {1, 0}, {0x1.059b0d3158574p+0, 0x1.cd2523567f613p-55},
    {0x1.0b5586cf9890fp+0, 0x1.79aa65d837b6dp-54}, {0x1.11301d0125b51p+0, -0x1.556522a2fbd0ep-54},
    {0x1.172b83c7d517bp+0, -0x1.01b15eaa59348p-55}, {0x1.1d4873168b9aap+0, 0x1.aecf73e3a2f60p-54},
    {0x1.2387a6e756238p+0, 0x1.68efde3a8a894p-54}, {0x1.29e9df51fdee1p+0, 0x1.2f7e16d09ab31p-55},
    {0x1.306fe0a31b715p+0, 0x1.34d754db0abb6p-55}, {0x1.371a7373aa9cbp+0, -0x1.24aedcc4b5069p-54},
    {0x1.3dea64c123422p+0, 0x1.59f48a72a4c6dp-55}, {0x1.44e086061892dp+0, 0x1.363ed60c2ac12p-59},
    {0x1.4bfdad5362a27p+0, 0x1.690cebb7aafb0p-56}, {0x1.5342b569d4f82p+0, -0x1.8dec6bd0f3860p-56},
    {0x1.5ab07dd485429p+0, 0x1.063e1e21c5409p-54}, {0x1.6247eb03a5585p+0, -0x1.c33c53bef4da8p-55},
    {0x1.6a09e667f3bcdp+0, -0x1.3b3efbf5e2229p-54}, {0x1.71f75e8ec5f74p+0, -0x1.81f647e5a3ecep-56},
    {0x1.7a11473eb0187p+0, -0x1.b32dcb94da51dp-56}, {0x1.82589994cce13p+0, -0x1.369b6f13b3734p-54},
    {0x1.8ace5422aa0dbp+0, 0x1.db72fc1f0eab5p-55}, {0x1.93737b0cdc5e5p+0, -0x1.da9b88b6c1e29p-58},
    {0x1.9c49182a3f090p+0, 0x1.1affc2b91ce27p-56}, {0x1.a5503b23e255dp+0, -0x1.1bbd1d3bcbb15p-54},
    {0x1.ae89f995ad3adp+0, 0x1.c1a7792cb3386p-55}, {0x1.b7f76f2fb5e47p+0, -0x1.8d6f438ad9334p-57},
    {0x1.c199bdd85529cp+0, 0x1.36eae30af0cb3p-56}, {0x1.cb720dcef9069p+0, 0x1.76b2c6c921967p-57},
    {0x1.d5818dcfba487p+0, 0x1.4a385a63d07a8p-56}, {0x1.dfc97337b9b5fp+0, -0x1.2d52107b43e20p-55},
    {0x1.ea4afa2a490dap+0, -0x1.ff7128fd391f0p-55}, {0x1.f50765b6e4540p+0, 0x1.a64a931d185eep-55}};
// clang-format on

/// The table, one number per lane.
class PowersOfTwo {
 public:
  __device__ __forceinline__ PowersOfTwo() {
    const double2 power = __ldg(reinterpret_cast<const double2*>(kPowersOfTwo[lane_number()]));
    high_ = power.x, low_ = __double2hiint(power.y);
  }

  /// 2^(n % 32 / 32) = high (1 + low). All lanes of a warp take part.
  __device__ __forceinline__ double high(int n) const {
    return __hiloint2double(of_lane(__double2hiint(high_), n), of_lane(__double2loint(high_), n));
  }
  __device__ __forceinline__ double low(int n) const { return __hiloint2double(of_lane(low_, n), 0); }

 private:
  __device__ __forceinline__ static int of_lane(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

  double high_;
  int low_;  ///< the upper half
};

class Exponential {
 public:
  /// All lanes of a warp take part. The error is at most 0.56 units in the last place. Results are 0 up to 1.02 times
  /// the smallest normal number, and infinity from the inverse of that up.
  __device__ __forceinline__ double operator()(double x) const {
    constexpr double shifter = 6755399441055744.0;  // 1.5 * 2^52: a sum's lowest bits are the number as an integer
    constexpr double unit = 0x1.71547652b82fep+5;   // 32 / ln 2
    constexpr double unit_high = 0x1.62e42fef00000p-6, unit_low = 0x1.473de6af278edp-39;  // ln 2 / 32
    const double shifted = fma(x, unit, shifter), steps = shifted - shifter;
    const int step = __double2loint(shifted);
    const double r = fma(steps, -unit_low, fma(steps, -unit_high, x));  // up to ln 2 / 64
    double share = fma(r, 1.0 / 720, 1.0 / 120);                        // (exp(r) - 1) / r
    share = fma(share, r, 1.0 / 24), share = fma(share, r, 1.0 / 6), share = fma(share, r, 0.5);
    share = fma(share, r, 1.0);
    const double high = table_.high(step), y = fma(high, fma(share, r, table_.low(step)), high);
    const int x_high = __double2hiint(x);
    const unsigned size = x_high & 0x7fffffff;
    int y_high = __double2hiint(y) + (step >> 5 << 20), y_low = __double2loint(y);
    if (size >= 0x40862315) {  // |x| from 708.385 up: one step below 1022 ln 2
      y_high = size > 0x7ff00000 ? 0x7ff80000 : x_high < 0 ? 0 : 0x7ff00000;
      y_low = 0;
    }
    return __hiloint2double(y_high, y_low);
  }

 private:
  PowersOfTwo table_;
};

/// exp(factor x) of kCount numbers, 13 operations each. x is finite or -inf, and not much above 0.
template <int kCount, class Numbers>
__device__ __forceinline__ void take_exponentials(const Numbers& x, const ScaledExponentialTerms& terms,
                                                  const PowersOfTwo& table) {
  constexpr double shifter = 6755399441055744.0;  // 1.5 * 2^52: a sum's lowest bits are the number as an integer
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const double y = x(i);
    const bool vanishes = static_cast<unsigned>(__double2hiint(y)) > terms.limit;  // compared as integers
    const double shifted = fma(y, terms.steps, shifter), steps = shifted - shifter;
    const int step = __double2loint(shifted);
    const double r = fma(steps, -terms.step_low, fma(steps, -terms.step, y));
    double share = fma(r, terms.share[5], terms.share[4]);
#pragma unroll
    for (int n = 3; n >= 0; --n) share = fma(share, r, terms.share[n]);
    const double high = table.high(step), power = fma(high, fma(share, r, table.low(step)), high);
    const int upper = __double2hiint(power) + (step >> 5 << 20);
    x(i) = __hiloint2double(vanishes ? 0 : upper, vanishes ? 0 : __double2loint(power));
  }
}

}  // namespace anyflash::cuda
