// What the machine can do at most, by loops that do nothing else: multiply-adds whose operands stay in registers, and
// reading memory. The scale that bench/kernels.cpp and bench/roofline hold the kernels against.

#include <cstdint>
#include <type_traits>

#include "cpu/gemm-inl.h"
#include "hwy/highway.h"

#if defined(ANYFLASH_BENCH_MACHINE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_BENCH_MACHINE_INL_H_
#undef ANYFLASH_BENCH_MACHINE_INL_H_
#else
#define ANYFLASH_BENCH_MACHINE_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::bench {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Sums that do not wait for each other: more than the latency of a multiply-add times those that start in a cycle, and
// with two operands no more than 16 registers.
constexpr int kSums = 12;
/// Vectors of E that multiply_adds reads.
constexpr int kFactors = kSums + 2;

/// Useful operations of one step of multiply_adds.
template <class E>
double operations_of_step() {
  const hn::ScalableTag<cpu::HWY_NAMESPACE::SumOf<E>> d;
  return 2.0 * kSums * static_cast<double>(hn::Lanes(d)) * (cpu::HWY_NAMESPACE::kIsPair<E> ? 2 : 1);
}

/// `steps` times kSums multiply-adds by the kernels' own instruction. Two of the kFactors vectors are the operands; the
/// sums begin with the others, which keeps the compiler from finding them all the same.
template <class E, class T = cpu::HWY_NAMESPACE::SumOf<E>>
HWY_NOINLINE T multiply_adds(std::int64_t steps, const E* factors) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto left = cpu::HWY_NAMESPACE::LoadFactors(d, factors);
  const auto right = cpu::HWY_NAMESPACE::LoadFactors(d, factors + lanes);
  hn::Vec<decltype(d)> sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = hn::Load(d, reinterpret_cast<const T*>(factors + (i + 2) * lanes));
  for (std::int64_t step = 0; step < steps; ++step)
    for (int i = 0; i < kSums; ++i) sums[i] = cpu::HWY_NAMESPACE::MulAddFactors<E>(d, left, right, sums[i]);
  for (int i = 1; i < kSums; ++i) sums[0] = hn::Add(sums[0], sums[i]);
  return hn::ReduceSum(d, sums[0]);
}

/// Reads `count` numbers, a multiple of kStreams * 4 vectors, as so many streams next to each other: one alone does not
/// keep enough lines on their way.
constexpr int kStreams = 4;
HWY_NOINLINE std::uint64_t read_all(const std::uint64_t* from, std::int64_t count) {
  const hn::ScalableTag<std::uint64_t> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d)), stream = count / kStreams;
  hn::Vec<decltype(d)> sums[kStreams];
  for (int s = 0; s < kStreams; ++s) sums[s] = hn::Zero(d);
  for (std::int64_t i = 0; i < stream; i += 4 * lanes)
    for (int s = 0; s < kStreams; ++s)
      for (int v = 0; v < 4; ++v) sums[s] = hn::Add(sums[s], hn::Load(d, from + s * stream + i + v * lanes));
  for (int s = 1; s < kStreams; ++s) sums[0] = hn::Add(sums[0], sums[s]);
  return hn::ReduceSum(d, sums[0]);
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::bench
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_BENCH_MACHINE_INL_H_
