// exp of float64, for kernels that make many at once beside products. CUDA's own ends in a branch for tiny results, so
// those of a thread come one after the other, each a chain of 20 operations; and what is float64 takes the tensor
// cores' time. Here are 12 operations and no branch: Tang 1989, with a table of 2^(i / 32), a number in each lane.
#pragma once

#include "cuda/common/instructions.cuh"

namespace anyflash::cuda {

/// 2^(i / 32), and what it lacks.
// clang-format off
alignas(16) static __device__ const double kPowersOfTwo[32][2] = {
    {1, 0}, {0x1.059b0d3158574p+0, 0x1.d73e2a475b465p-55},
    {0x1.0b5586cf9890fp+0, 0x1.8a62e4adc610bp-54}, {0x1.11301d0125b51p+0, -0x1.6c51039449b3ap-54},
    {0x1.172b83c7d517bp+0, -0x1.19041b9d78a76p-55}, {0x1.1d4873168b9aap+0, 0x1.e016e00a2643cp-54},
    {0x1.2387a6e756238p+0, 0x1.9b07eb6c70573p-54}, {0x1.29e9df51fdee1p+0, 0x1.612e8afad1255p-55},
    {0x1.306fe0a31b715p+0, 0x1.6f46ad23182e4p-55}, {0x1.371a7373aa9cbp+0, -0x1.63aeabf42eae2p-54},
    {0x1.3dea64c123422p+0, 0x1.ada0911f09ebcp-55}, {0x1.44e086061892dp+0, 0x1.89b7a04ef80d0p-59},
    {0x1.4bfdad5362a27p+0, 0x1.d4397afec42e2p-56}, {0x1.5342b569d4f82p+0, -0x1.07abe1db13cadp-55},
    {0x1.5ab07dd485429p+0, 0x1.6324c054647adp-54}, {0x1.6247eb03a5585p+0, -0x1.383c17e40b497p-54},
    {0x1.6a09e667f3bcdp+0, -0x1.bdd3413b26456p-54}, {0x1.71f75e8ec5f74p+0, -0x1.16e4786887a99p-55},
    {0x1.7a11473eb0187p+0, -0x1.41577ee04992fp-55}, {0x1.82589994cce13p+0, -0x1.d4c1dd41532d8p-54},
    {0x1.8ace5422aa0dbp+0, 0x1.6e9f156864b27p-54}, {0x1.93737b0cdc5e5p+0, -0x1.75fc781b57ebcp-57},
    {0x1.9c49182a3f090p+0, 0x1.c7c46b071f2bep-56}, {0x1.a5503b23e255dp+0, -0x1.d2f6edb8d41e1p-54},
    {0x1.ae89f995ad3adp+0, 0x1.7a1cd345dcc81p-54}, {0x1.b7f76f2fb5e47p+0, -0x1.5584f7e54ac3bp-56},
    {0x1.c199bdd85529cp+0, 0x1.11065895048ddp-55}, {0x1.cb720dcef9069p+0, 0x1.503cbd1e949dbp-56},
    {0x1.d5818dcfba487p+0, 0x1.2ed02d75b3707p-55}, {0x1.dfc97337b9b5fp+0, -0x1.1a5cd4f184b5cp-54},
    {0x1.ea4afa2a490dap+0, -0x1.e9c23179c2893p-54}, {0x1.f50765b6e4540p+0, 0x1.9d3e12dd8a18bp-54}};
// clang-format on

class Exponential {
 public:
  __device__ __forceinline__ Exponential() {
    const double2 power = __ldg(reinterpret_cast<const double2*>(kPowersOfTwo[lane_number()]));
    high_ = power.x, low_ = __double2hiint(power.y);
  }

  /// By all lanes of a warp. To 0.56 units in the last place; 0 up to 1.02 times the smallest normal number, infinity
  /// from the inverse of that up.
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
    const double high = __hiloint2double(of_lane(__double2hiint(high_), step), of_lane(__double2loint(high_), step));
    const double low = __hiloint2double(of_lane(low_, step), 0);
    const double y = high + fma(high * r, share, low);
    const int x_high = __double2hiint(x);
    const unsigned size = x_high & 0x7fffffff;
    int y_high = __double2hiint(y) + (step >> 5 << 20), y_low = __double2loint(y);
    if (size >= 0x40862315) {  // |x| from 708.385 up: a step from 1022 ln 2
      y_high = size > 0x7ff00000 ? 0x7ff80000 : x_high < 0 ? 0 : 0x7ff00000;
      y_low = 0;
    }
    return __hiloint2double(y_high, y_low);
  }

 private:
  __device__ __forceinline__ static int of_lane(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

  double high_;
  int low_;  ///< the upper half of what high_ lacks
};

}  // namespace anyflash::cuda
