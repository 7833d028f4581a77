// The kernels' inner loops by themselves, in the shapes that attention uses, each as a part of what the machine can do.
//
//   peak/TYPE              GFLOP/s of multiply-adds whose operands stay in registers; pairs: of bfloat16
//   read                   GB/s of memory far beyond the caches
//   gemm/PRODUCT/TYPE      the products of a tile of 64 queries and 64 keys
//   decode/PRODUCT/TYPE    those of 4 query heads and 64 keys, with keys and values where they lie; pairs: of bfloat16
//   exp/TYPE, softmax/TYPE of numbers in the nearest cache; softmax: 64 rows of 64 scores, nothing hidden
//   transpose/TYPE         rows of 64 channels, GB/s read and written, as a part of copying them
//
// Compiled for every instruction set like the library; ANYFLASH_ISA chooses one. Rates are of the thread's own time,
// so that other work on the machine disturbs them less; `read` and peaks of several threads go by the clock.
#include <time.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/kernels.cpp"
#include "hwy/foreach_target.h"

#include <anyflash/devices.h>
#include <benchmark/benchmark.h>

#include "cpu/backend.h"
#include "cpu/workspace.h"

#include "hwy/highway.h"

#include "cpu/exp-inl.h"
#include "cpu/few_products-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/pairs-inl.h"
#include "cpu/rows-inl.h"
#include "cpu/softmax-inl.h"
#include "bench/machine-inl.h"

#ifndef ANYFLASH_BENCH_KERNELS_ONCE_
#define ANYFLASH_BENCH_KERNELS_ONCE_
namespace anyflash::bench {

using benchmark::State;

inline double seconds_of(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}
inline double thread_seconds() { return seconds_of(CLOCK_THREAD_CPUTIME_ID); }

/// Runs `work` as often as the state asks for; returns the seconds of one, the thread's own if not said otherwise.
template <class Work>
double timed(State& state, const Work& work, clockid_t clock = CLOCK_THREAD_CPUTIME_ID) {
  double start = 0, end = 0;  // read inside of the loop: before and after it, threads wait for each other
  benchmark::IterationCount done = 0;
  for (auto _ : state) {
    if (done == 0) start = seconds_of(clock);
    work();
    benchmark::ClobberMemory();
    if (++done == state.max_iterations) end = seconds_of(clock);
  }
  return (end - start) / static_cast<double>(done);
}

/// Operations of one run, GFLOP/s, and how much that is of the peak; a peak of 0: it is not known.
inline void report(State& state, double operations, double seconds, double peak) {
  state.counters["operations"] = operations;
  state.counters["GFLOP/s"] = operations / seconds / 1e9;
  if (peak > 0) state.counters["percent_of_peak"] = 100 * operations / seconds / peak;
}

/// Bytes that each of so many threads reads: together far beyond the caches, on many threads not all of the memory.
inline std::int64_t read_bytes(int threads) {
  constexpr std::int64_t megabyte = 1 << 20;
  return std::max<std::int64_t>(64, 1024 / threads) * megabyte;
}

/// How many threads may run at a time in the benchmarks that measure the machine.
inline std::vector<int>& thread_counts() {
  static std::vector<int> counts = {1, std::max(1, static_cast<int>(std::thread::hardware_concurrency()))};
  return counts;
}

}  // namespace anyflash::bench
#endif  // ANYFLASH_BENCH_KERNELS_ONCE_

HWY_BEFORE_NAMESPACE();
namespace anyflash::bench {
namespace HWY_NAMESPACE {

using namespace cpu::HWY_NAMESPACE;
using cpu::allocate, cpu::kTile;

/// Whether the tiles of AMX multiply E: a loop that is not here, and whose peak is not measured.
template <class E>
constexpr bool kInTiles = kIsPair<E> && ANYFLASH_PAIRS_IN_TILES;

/// What multiplies Pairs, if anything does.
const char* pairs_by() {
  if (HWY_NATIVE_DOT_BF16) return "instruction";
  return ANYFLASH_PAIRS && cpu::tiles_in_use() ? "tiles" : "nothing";
}

template <class E>
constexpr const char* kName = kIsPair<E>       ? "pairs"
                              : sizeof(E) == 8 ? "float64"
                                               : "float32";

/// `count` numbers between -1 and 1, none of them tiny; of Pairs, so many pairs.
template <class E>
hwy::AlignedFreeUniquePtr<E[]> numbers(std::int64_t count) {
  auto made = allocate<E>(count);
  for (std::int64_t i = 0; i < count; ++i) {
    const double x = (i * 37 % 101 - 50.5) / 51;
    if constexpr (kIsPair<E>) {
      const std::uint32_t half = hwy::BitCastScalar<std::uint16_t>(hwy::BF16FromF32(static_cast<float>(x)));
      made[i] = Pair{half << 16 | half};
    } else {
      made[i] = static_cast<E>(x);
    }
  }
  return made;
}

/// Operations a second of one thread at best; 0 if it is not measured.
template <class E>
double peak() {
  if constexpr (kInTiles<E>) {
    return 0;
  } else {
    static const double best = [] {
      const auto factors = numbers<E>(kFactors * static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<SumOf<E>>())));
      constexpr std::int64_t steps = 200000;
      double fastest = 0;
      for (int i = 0; i < 50; ++i) {
        const double start = thread_seconds();
        benchmark::DoNotOptimize(multiply_adds(steps, factors.get()));
        fastest = std::max(fastest, operations_of_step<E>() * steps / (thread_seconds() - start));
      }
      return fastest;
    }();
    return best;
  }
}

/// Speeds of several threads add up.
template <class E>
void run_peak(State& state) {
  const auto factors = numbers<E>(kFactors * static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<SumOf<E>>())));
  constexpr std::int64_t steps = 20000;
  const double seconds =
      timed(state, [&]() HWY_ATTR { benchmark::DoNotOptimize(multiply_adds(steps, factors.get())); }, CLOCK_MONOTONIC);
  report(state, operations_of_step<E>() * steps, seconds, 0);
}

void run_read(State& state) {
  const auto bytes = read_bytes(state.threads()), count = bytes / 8;
  const auto memory = allocate<std::uint64_t>(count);
  std::memset(memory.get(), 1, static_cast<std::size_t>(bytes));
  const double seconds =
      timed(state, [&]() HWY_ATTR { benchmark::DoNotOptimize(read_all(memory.get(), count)); }, CLOCK_MONOTONIC);
  state.counters["GB/s"] = static_cast<double>(bytes) / seconds / 1e9;
}

/// A product of the kernels: C (rows, n) = or += A (rows, depth) B (depth, n), depth and n in numbers.
struct Product {
  const char* name;
  std::int64_t rows, depth, n;
  bool add, transposed;  // of A in memory: for tiles apart, which take it in rows
};

template <class E>
void run_gemm(State& state, Product product) {
  const auto depth = Depth<E>(product.depth);
  const bool in_columns = product.transposed && !kInTiles<E>;
  const auto a = numbers<E>(product.rows * depth), b = numbers<E>(depth * product.n);
  const auto c = numbers<SumOf<E>>(product.rows * product.n);
  const std::int64_t a_row = in_columns ? 1 : depth, a_k = in_columns ? product.rows : 1;
  const double seconds = timed(state, [&]() HWY_ATTR {
    const auto multiply = [&]<bool kAdd>() HWY_ATTR {
      Gemm<kAdd>(product.rows, depth, product.n, a.get(), a_row, a_k, b.get(), product.n, c.get(), product.n);
    };
    product.add ? multiply.template operator()<true>() : multiply.template operator()<false>();
  });
  report(state, 2.0 * static_cast<double>(product.rows * product.depth * product.n), seconds, peak<E>());
}

constexpr std::int64_t kDecodeRows = 4;

template <class E, class T = SumOf<E>>
void run_decode_scores(State& state, std::int64_t d) {
  const auto depth = Depth<E>(d);
  const auto q = numbers<E>(kDecodeRows * depth), rows = numbers<E>(kTile * depth), columns = numbers<E>(depth * kTile);
  const auto s = numbers<T>(kDecodeRows * kTile);
  const auto* const keys = reinterpret_cast<const T*>(rows.get());
  const double seconds = timed(state, [&]() HWY_ATTR {
    if constexpr (kInTiles<E>) {
      TransposeKeys(kTile, keys, depth, depth, reinterpret_cast<T*>(columns.get()));
      Gemm<false>(kDecodeRows, depth, kTile, q.get(), depth, 1, columns.get(), kTile, s.get(), kTile);
    } else {
      constexpr int keys_at_once = static_cast<int>(hn::MaxLanes(hn::ScalableTag<T>()));
      for (int key = 0; key < kTile; key += keys_at_once)
        ProductsOfKeys<kDecodeRows, Fetch::nothing>(q.get(), depth, keys + key * depth, depth, s.get() + key, 0);
    }
  });
  report(state, 2.0 * static_cast<double>(kDecodeRows * d * kTile), seconds, peak<E>());
}

/// Values are of Memory, and computed in T.
template <class T, class Memory>
void run_decode_values(State& state, std::int64_t d) {
  const auto p = numbers<T>(kDecodeRows * kTile), out = numbers<T>(kDecodeRows * d);
  const auto x = numbers<T>(kTile * d);
  const auto v = allocate<Memory>(kTile * d);
  for (std::int64_t i = 0; i < kTile * d; ++i) v[i] = hwy::ConvertScalarTo<Memory>(x[i]);
  const double seconds =
      timed(state, [&]() HWY_ATTR { AddValues<kDecodeRows>(kTile, p.get(), v.get(), d, d, out.get(), 0); });
  report(state, 2.0 * static_cast<double>(kDecodeRows * d * kTile), seconds, peak<T>());
}

template <class T>
void run_exp(State& state) {
  constexpr std::int64_t count = 1024;
  const hn::ScalableTag<T> d;
  const auto from = numbers<T>(count), to = numbers<T>(count);
  const double seconds = timed(state, [&]() HWY_ATTR {
    for (std::int64_t i = 0; i < count; i += hn::Lanes(d))
      hn::Store(SoftmaxExp(d, hn::Load(d, from.get() + i)), d, to.get() + i);
  });
  report(state, kExpOperations<T> * count, seconds, peak<T>());
  state.counters["ns_a_number"] = seconds / count * 1e9;
}

template <class E, class T = SumOf<E>>
void run_softmax(State& state) {
  const auto scores = numbers<T>(kTile * kTile);
  const auto p = numbers<E>(kTile * Depth<E>(kTile));
  const auto shift = numbers<T>(kTile), out = numbers<T>(kTile * kTile);
  const auto row_max = numbers<T>(kTile * kSumLanes), row_sum = numbers<T>(kTile * kSumLanes);
  const RowState<T> rows{shift.get(), row_max.get(), row_sum.get(), out.get(), kTile};
  rows.clear(kTile);
  const double seconds = timed(state, [&]() HWY_ATTR {
    for (std::int64_t row = 0; row < kTile; ++row)
      SoftmaxRow<false, kTile>(0, scores.get() + row * kTile, p.get() + row * Depth<E>(kTile), row, rows);
  });
  constexpr double count = kTile * kTile, others = sizeof(T) == 4 ? 4 : 3;  // maximum, difference, sum; float32: scale
  report(state, (kExpOperations<T> + others) * count, seconds, peak<T>());
  state.counters["ns_a_number"] = seconds / count * 1e9;
}

template <class E>
void run_transpose(State& state) {
  const std::int64_t width = kIsPair<E> ? kTile / 2 : kTile;
  const auto bytes = kTile * width * static_cast<std::int64_t>(sizeof(E));
  const auto from = numbers<E>(kTile * width), to = numbers<E>(kTile * width);
  const double seconds = timed(state, [&]() HWY_ATTR {
    if constexpr (kIsPair<E>) {
      TransposeWords(from.get(), width, to.get());
    } else {
      TransposeRows(from.get(), width, to.get());
    }
  });
  constexpr int copies = 20000;
  const double start = thread_seconds();
  for (int i = 0; i < copies; ++i) {
    std::memcpy(to.get(), from.get(), static_cast<std::size_t>(bytes));
    benchmark::ClobberMemory();
  }
  const double copying = (thread_seconds() - start) / copies;
  state.counters["GB/s"] = 2e-9 * static_cast<double>(bytes) / seconds;
  state.counters["percent_of_copying"] = 100 * copying / seconds;
}

template <class E>
void register_products() {
  for (const std::int64_t d : {64, 128}) {
    const auto size = "/d" + std::to_string(d);
    const auto name = [&](const std::string& product) { return product + size + "/" + kName<E>; };
    for (const Product& product :
         {Product{"scores", 64, d, 64, false, false}, Product{"values", 64, 64, d, true, false},
          Product{"key_gradients", 64, 64, d, true, true}})
      benchmark::RegisterBenchmark(name(std::string("gemm/") + product.name).c_str(), run_gemm<E>, product);
    benchmark::RegisterBenchmark(name("decode/scores").c_str(), run_decode_scores<E>, d);
    using Memory = std::conditional_t<kIsPair<E>, hwy::bfloat16_t, SumOf<E>>;
    benchmark::RegisterBenchmark(name("decode/values").c_str(), run_decode_values<SumOf<E>, Memory>, d);
  }
}

template <class E>
void register_type() {
  const std::string name = kName<E>;
  if constexpr (!kInTiles<E>)
    for (const int threads : thread_counts())
      benchmark::RegisterBenchmark(("peak/" + name).c_str(), run_peak<E>)->Threads(threads)->UseRealTime();
  register_products<E>();
  if constexpr (!kIsPair<E>) benchmark::RegisterBenchmark(("exp/" + name).c_str(), run_exp<E>);
  benchmark::RegisterBenchmark(("softmax/" + name).c_str(), run_softmax<E>);
  benchmark::RegisterBenchmark(("transpose/" + name).c_str(), run_transpose<E>);
}

void register_all() {
  benchmark::AddCustomContext("pairs", pairs_by());
  for (const int threads : thread_counts())
    benchmark::RegisterBenchmark("read", run_read)->Threads(threads)->UseRealTime()->Unit(benchmark::kMillisecond);
  register_type<float>();
  register_type<double>();
#if ANYFLASH_PAIRS
  if (HWY_NATIVE_DOT_BF16 || cpu::tiles_in_use()) register_type<Pair>();
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace anyflash::bench {
HWY_EXPORT(register_all);
}

// --machine_threads=N: N threads alone measure the machine, in place of one and all.
int main(int argc, char** argv) try {
  std::vector<char*> rest;
  for (int i = 0; i < argc; ++i) {
    constexpr std::string_view option = "--machine_threads=";
    const std::string_view argument = argv[i];
    if (!argument.starts_with(option)) {
      rest.push_back(argv[i]);
      continue;
    }
    const char* end = argument.data() + argument.size();
    int threads = 0;
    const auto [rest_of_it, error] = std::from_chars(argument.data() + option.size(), end, threads);
    if (error != std::errc() || rest_of_it != end || threads < 1 || threads > 1024) {
      std::fprintf(stderr, "bench_kernels: %s: expected a whole number from 1 to 1024\n", argv[i]);
      return 1;
    }
    anyflash::bench::thread_counts() = {threads};
  }
  auto& counts = anyflash::bench::thread_counts();
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  int count = static_cast<int>(rest.size());
  benchmark::Initialize(&count, rest.data());
  if (benchmark::ReportUnrecognizedArguments(count, rest.data())) return 1;
  benchmark::AddCustomContext("instruction_set", anyflash::instruction_set());
  HWY_DYNAMIC_DISPATCH(anyflash::bench::register_all)();
  if (benchmark::RunSpecifiedBenchmarks() > 0) return 0;
  std::fprintf(stderr, "bench_kernels: no benchmark has such a name\n");
  return 1;
} catch (const anyflash::Error& error) {
  std::fprintf(stderr, "bench_kernels: %s\n", error.what());
  return 1;
}
#endif  // HWY_ONCE
