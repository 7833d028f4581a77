// How to test a device function without a device: CUDA's names, made by a CPU.
//
// A rung includes device.h. Compiled by g++, device.h takes this file in CUDA's place. Each thread of a thread block is
// a fiber: a stack of its own, switched by setjmp and longjmp. One fiber runs at a time, until it has to wait for
// others: at __syncthreads, at a shuffle, at an mma, at an mbarrier. Then the next one runs.
//
// The order is as unkind as CUDA allows. A warp runs as far ahead of the others as barriers let it, and in a warp a lane
// as far as instructions of the whole warp let it. In half of the thread blocks the last one goes first. Asynchronous
// copies arrive as late as possible, or, in half of the thread blocks, at once. So a missing barrier gives a wrong
// result here, each time, where a GPU often gives the right one by chance.
//
// What is reported, in one line:
// - threads that wait for each other (deadlock), or at __syncthreads of different lines (divergence);
// - lanes of a warp that come to different instructions where all 32 must take part;
// - memory that is misaligned, or out of the bounds of an array or of the dynamic shared memory (the compiler's checks:
//   -fsanitize=alignment,bounds; the page behind shared memory cannot be touched);
// - shared memory that nothing has written, if ldmatrix or wgmma reads it. Ordinary loads get NaN: shared memory is
//   filled with the byte 0xff before a thread block starts, which is NaN in every type, and NaN spreads to the result.
// Not found: races between threads whose order here happens to be right, and whatever has to do with speed.
#pragma once

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstring>
#include <deque>
#include <functional>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// All of them lie in one section of the module, from __start_shared to __stop_shared. Not in templates: g++ ignores it.
#define __shared__ static __attribute__((section("shared")))
extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_shared[], __stop_shared[];

struct dim3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the fiber that runs

namespace emulator {

constexpr unsigned kWarp = 32, kWarpgroup = 128, kMostThreads = 1024;
constexpr std::size_t kStack = 256 << 10, kMostShared = 228 << 10, kPage = 4096;
constexpr unsigned char kUnwritten = 0xff;

// Where a warp, or a warpgroup, meets. The last to come does the work for all.
struct Meeting {
  unsigned arrived, generation;
  const char* what;
  int line;
  void* lanes[kWarpgroup];
};

// __syncthreads is barrier 0; bar.sync and bar.arrive take any of the 16.
struct NamedBarrier {
  unsigned arrived, generation, count;
  int line;
};

// A copy or a product that is on its way.
using Work = std::function<void()>;

struct Fiber {
  ucontext_t begin;
  std::jmp_buf here;
  dim3 index;
  bool begun, done;
  const unsigned* word;  // null, or: runs again once this word is no longer `value`
  unsigned value;
  const char* waits;  // for what
  int line;
  std::deque<std::vector<Work>> copies, products;  // groups, the last of which is not committed yet
  std::vector<Work> bulks;                         // additions to global memory that read shared memory
  std::vector<const float*> pending;               // accumulators of the products on their way
  bool fenced;                                     // wgmma.fence since the last commit
};

struct Block {
  std::vector<Fiber> fibers;
  Meeting warps[kMostThreads / kWarp], warpgroups[kMostThreads / kWarpgroup];
  NamedBarrier barriers[16];
  std::deque<Work> transfers;     // of TMA: they belong to no thread
  unsigned char *shared, *proxy;  // dynamic shared memory; the same as the asynchronous proxy sees it
  std::size_t bytes;              // of it
  bool unfenced;                  // an mbarrier was initialized, without fence_barrier_init since
  bool forward, late;             // whether the first thread goes first; whether copies arrive late
  std::jmp_buf scheduler, stop;
};

inline Block block;
inline Fiber* now;         // the fiber that runs, or null
inline std::string error;  // the first one; then nothing is launched any more
inline long conflicts;     // of banks, by ldmatrix: accesses beyond the first of each matrix

inline unsigned thread() { return unsigned(now - block.fibers.data()); }

// Ends the launch.
[[noreturn]] inline void fail(const char* format, ...) {
  char text[300];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  char place[100] = "";
  if (now)
    std::snprintf(place, sizeof place, "block (%u, %u, %u), thread %u: ", blockIdx.x, blockIdx.y, blockIdx.z, thread());
  error = std::string(place) + text;
  _longjmp(block.stop, 1);
}

// Back to the scheduler, until *word is no longer value.
__attribute__((noinline)) inline void pause(const char* waits, int line, const unsigned* word, unsigned value) {
  now->waits = waits, now->line = line, now->word = word, now->value = value;
  if (!_setjmp(now->here)) _longjmp(block.scheduler, 1);
}

template <class Do>
void meet(Meeting& at, unsigned size, const char* what, int line, void* mine, const Do& work) {
  if (at.arrived && (at.what != what || at.line != line))
    fail("%s of line %d, but other threads of its warp are at %s of line %d", what, line, at.what, at.line);
  at.what = what, at.line = line, at.lanes[thread() % size] = mine;
  if (++at.arrived < size) return pause(what, line, &at.generation, at.generation);
  at.arrived = 0, ++at.generation;
  work(at.lanes);
}
template <class Do>
void warp_meets(const char* what, int line, void* mine, const Do& work) {
  meet(block.warps[thread() / kWarp], kWarp, what, line, mine, work);
}

inline void arrive(unsigned id, unsigned count, bool wait, const char* what, int line) {
  if (id >= 16) fail("barrier %u, of 16", id);
  NamedBarrier& at = block.barriers[id];
  if (at.arrived && at.count != count)
    fail("barrier %u: %u threads expected in line %d, %u before", id, count, line, at.count);
  if (id == 0 && at.arrived && at.line != line)
    fail("divergence: __syncthreads of line %d, but other threads are at that of line %d", line, at.line);
  at.count = count, at.line = line;
  const unsigned generation = at.generation;
  if (++at.arrived == count) {
    at.arrived = 0, ++at.generation;
  } else if (wait) {
    pause(what, line, &at.generation, generation);
  }
}

// --- The scheduler ---------------------------------------------------------------------------------------------------

inline std::function<void()> body;  // the kernel with its arguments

inline void run_body() {
  body();
  if (!now->copies.empty() && !now->copies.front().empty()) fail("returns with a cp.async that nothing waited for");
  if (!now->bulks.empty()) fail("returns with a bulk_add that nothing waited for");
  if (!now->products.empty() && !now->products.front().empty()) fail("returns with a wgmma that nothing waited for");
  now->done = true;
  _longjmp(block.scheduler, 1);
}

__attribute__((noinline)) inline void resume(Fiber& fiber) {
  now = &fiber, threadIdx = fiber.index, fiber.word = nullptr;
  if (_setjmp(block.scheduler)) return;
  if (fiber.begun) _longjmp(fiber.here, 1);
  fiber.begun = true;
  setcontext(&fiber.begin);
}

[[noreturn]] inline void fail_deadlock() {
  std::string line;
  unsigned returned = 0;
  for (std::size_t n = 0; n < block.fibers.size();) {
    const Fiber& first = block.fibers[n];
    const auto like_first = [&](const Fiber& f) {
      return f.done == first.done && f.waits == first.waits && f.line == first.line;
    };
    std::size_t end = n;
    while (end < block.fibers.size() && like_first(block.fibers[end])) ++end;
    if (first.done) {
      returned += unsigned(end - n);
    } else if (line.size() < 200) {
      line += (line.empty() ? "threads " : ", ") + std::to_string(n) + " to " + std::to_string(end - 1) + " wait at " +
              first.waits + " of line " + std::to_string(first.line);
    }
    n = end;
  }
  now = nullptr;
  fail("deadlock in block (%u, %u, %u): %s; %u have returned", blockIdx.x, blockIdx.y, blockIdx.z, line.c_str(),
       returned);
}

// Lets the lanes of a warp run until all of them are done or wait for other warps. Whether any could go on.
inline bool run_warp(unsigned first) {
  const unsigned lanes = std::min(kWarp, unsigned(block.fibers.size()) - first);
  bool moved = false;
  for (bool again = true; again;) {
    again = false;
    for (unsigned n = 0; n < lanes; ++n) {
      Fiber& fiber = block.fibers[first + (block.forward ? n : lanes - 1 - n)];
      if (fiber.done || (fiber.word && *fiber.word == fiber.value)) continue;
      again = moved = true;
      resume(fiber);
    }
  }
  return moved;
}

inline void run_block() {
  const unsigned count = unsigned(block.fibers.size()), warps = (count + kWarp - 1) / kWarp;
  const auto done = [](const Fiber& fiber) { return fiber.done; };
  while (!std::all_of(block.fibers.begin(), block.fibers.end(), done)) {
    bool moved = false;
    for (unsigned first = 0; first < warps; first += 4)  // a warpgroup runs until it must wait for another one
      for (bool again = true; again; moved |= again) {
        again = false;
        for (unsigned n = first; n < std::min(first + 4, warps); ++n)
          again |= run_warp(kWarp * (block.forward ? n : warps - 1 - n));
      }
    if (moved) continue;
    if (block.transfers.empty()) fail_deadlock();
    block.transfers.back()();  // the newest one: TMA keeps no order
    block.transfers.pop_back();
  }
  now = nullptr;
  if (!block.transfers.empty()) fail("a thread block returned while a TMA load was on its way");
  for (const NamedBarrier& at : block.barriers)
    if (at.arrived)
      fail("a thread block returned with arrivals that nobody waited for, at bar.arrive of line %d", at.line);
}

// Fresh fibers, unwritten memory, new barriers.
inline void prepare_block(std::size_t shared_bytes) {
  static unsigned char* const stacks = static_cast<unsigned char*>(
      mmap(nullptr, kStack * kMostThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  static unsigned char* const memory = static_cast<unsigned char*>(
      mmap(nullptr, 2 * kMostShared + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  static unsigned char* const end = memory + kMostShared;  // of shared memory; behind it a page that nobody may touch
  static const int protect = mprotect(end, kPage, PROT_NONE);
  (void)protect;
  if (shared_bytes > kMostShared - 1024)
    fail("%zu bytes of shared memory, at most %zu", shared_bytes, kMostShared - 1024);
  block.bytes = (shared_bytes + 1023) / 1024 * 1024;
  block.shared = end - block.bytes, block.proxy = end + kPage;
  std::memset(block.shared, kUnwritten, block.bytes), std::memset(block.proxy, kUnwritten, block.bytes);
  if (__start_shared) std::memset(__start_shared, kUnwritten, __stop_shared - __start_shared);
  for (auto& meeting : block.warps) meeting = {};
  for (auto& meeting : block.warpgroups) meeting = {};
  for (auto& barrier : block.barriers) barrier = {};
  block.transfers.clear(), block.unfenced = false;
  block.fibers.resize(blockDim.x * blockDim.y * blockDim.z);
  for (unsigned n = 0; n < block.fibers.size(); ++n) {
    Fiber& fiber = block.fibers[n];
    fiber.begun = fiber.done = fiber.fenced = false, fiber.word = nullptr, fiber.waits = "", fiber.line = 0;
    fiber.copies.assign(1, {}), fiber.products.assign(1, {}), fiber.pending.clear(), fiber.bulks.clear();
    fiber.index = dim3(n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y);
    getcontext(&fiber.begin);
    fiber.begin.uc_stack.ss_sp = stacks + kStack * n, fiber.begin.uc_stack.ss_size = kStack;
    fiber.begin.uc_link = nullptr;
    makecontext(&fiber.begin, run_body, 0);
  }
}

inline void on_signal(int) { fail("misaligned or out of bounds"); }

// What a faulty access ends in becomes a line, for the time of a launch.
struct Signals {
  Signals() {
    struct sigaction action = {};
    action.sa_handler = on_signal, action.sa_flags = SA_NODEFER;
    for (int n = 0; n < 3; ++n) sigaction(kSignals[n], &action, &before[n]);
  }
  ~Signals() {
    for (int n = 0; n < 3; ++n) sigaction(kSignals[n], &before[n], nullptr);
  }
  static constexpr int kSignals[3] = {SIGSEGV, SIGILL, SIGBUS};
  struct sigaction before[3];
};

// Each of the four ways is as frequent as the others, in no simple order, and the same in every run.
inline void choose_order() {
  static unsigned count = 0;
  const unsigned way = count++ * 2654435761u >> 30;
  block.forward = way % 2 == 0, block.late = way / 2 == 0;
}

inline void run_grid(dim3 grid, std::size_t shared_bytes) {
  if (_setjmp(block.stop)) {
    now = nullptr;
    return;
  }
  gridDim = grid;
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        choose_order();
        prepare_block(shared_bytes);
        run_block();
      }
}

}  // namespace emulator

template <class... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 threads, int shared_bytes,
            std::type_identity_t<Parameters>... arguments) {
  if (!emulator::error.empty()) return;
  const emulator::Signals signals;
  blockDim = threads;
  emulator::body = [=] { kernel(arguments...); };
  emulator::run_grid(grid, shared_bytes);
}

// For the tests: what went wrong since the last time they asked, and how many bank conflicts there were.
extern "C" inline __attribute__((used)) const char* emulator_error() {
  static std::string told;
  told = emulator::error, emulator::error.clear();
  return told.c_str();
}
extern "C" inline __attribute__((used)) long emulator_conflicts() { return emulator::conflicts; }

template <class T>
struct DeviceArray {
  explicit DeviceArray(std::size_t count) : numbers(count + 1), data(numbers.data()) {
    std::memset(static_cast<void*>(data), emulator::kUnwritten, count * sizeof(T));
  }
  explicit DeviceArray(const std::vector<T>& from) : numbers(from), data(numbers.data()) {}
  DeviceArray(const DeviceArray&) = delete;
  void clear(std::size_t count) const { std::memset(static_cast<void*>(data), 0, count * sizeof(T)); }
  std::vector<T> get(std::size_t count) const { return {numbers.begin(), numbers.begin() + count}; }
  std::vector<T> numbers;
  T* data;
};

template <class T>
T* shared_memory() {
  return reinterpret_cast<T*>(emulator::block.shared);
}

// --- CUDA C++ --------------------------------------------------------------------------------------------------------

inline void __syncthreads(int line = __builtin_LINE()) {
  emulator::arrive(0, unsigned(emulator::block.fibers.size()), true, "__syncthreads", line);
}
inline void __syncwarp(unsigned = ~0u, int line = __builtin_LINE()) {
  emulator::warp_meets("__syncwarp", line, nullptr, [](void**) {});
}

namespace emulator {
// Each lane gives x and gets that of lane from(its own number).
template <class T, class From>
T shuffle(const char* what, int line, unsigned mask, T x, const From& from) {
  if (mask != ~0u) fail("%s of line %d: only whole warps, mask 0xffffffff", what, line);
  struct Lane {
    T given, got;
    unsigned from;
  } mine{x, x, unsigned(from(thread() % kWarp))};
  warp_meets(what, line, &mine, [](void** lanes) {
    for (unsigned n = 0; n < kWarp; ++n) {
      Lane& lane = *static_cast<Lane*>(lanes[n]);
      lane.got = static_cast<Lane*>(lanes[lane.from < kWarp ? lane.from : n])->given;
    }
  });
  return mine.got;
}
}  // namespace emulator

template <class T>
T __shfl_xor_sync(unsigned mask, T x, int with, int line = __builtin_LINE()) {
  return emulator::shuffle("__shfl_xor_sync", line, mask, x, [=](unsigned lane) { return lane ^ unsigned(with); });
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, int by, int line = __builtin_LINE()) {
  return emulator::shuffle("__shfl_down_sync", line, mask, x, [=](unsigned lane) { return lane + unsigned(by); });
}
template <class T>
T __shfl_sync(unsigned mask, T x, int from, int line = __builtin_LINE()) {
  return emulator::shuffle("__shfl_sync", line, mask, x, [=](unsigned) { return unsigned(from) % 32; });
}
inline unsigned __ballot_sync(unsigned mask, bool yes, int line = __builtin_LINE()) {
  unsigned word = yes ? 1u << emulator::thread() % 32 : 0;
  for (int with = 1; with < 32; with *= 2) word |= __shfl_xor_sync(mask, word, with, line);
  return word;
}
inline int __any_sync(unsigned mask, bool yes, int line = __builtin_LINE()) {
  return __ballot_sync(mask, yes, line) != 0;
}

// One fiber runs at a time, so that an atomic function is an ordinary one.
template <class T>
T atomicAdd(T* to, std::type_identity_t<T> x) {
  const T before = *to;
  *to = before + x;
  return before;
}
template <class T>
T atomicMax(T* to, std::type_identity_t<T> x) {
  const T before = *to;
  if (x > before) *to = x;
  return before;
}

using std::max, std::min;
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// --- float16 and bfloat16 --------------------------------------------------------------------------------------------

namespace emulator {
// Rounds to a type with so many bits of exponent and mantissa, to nearest, ties to even.
inline std::uint16_t round_16(float x, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, lowest = 1 - bias;
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0,
                      infinity = std::uint16_t(((1 << exponent_bits) - 1) << mantissa_bits);
  if (std::isnan(x)) return std::uint16_t(sign | infinity | 1 << (mantissa_bits - 1));
  if (x == 0) return sign;
  if (std::isinf(x)) return sign | infinity;
  int exponent = std::max(std::ilogb(x), lowest);
  const double steps = std::nearbyint(std::ldexp(std::abs(double(x)), mantissa_bits - exponent));
  const double bits = steps + std::ldexp(double(exponent + bias - 1), mantissa_bits);  // a carry moves the exponent up
  return bits >= infinity ? sign | infinity : std::uint16_t(sign | std::uint16_t(bits));
}
inline float widen_16(std::uint16_t x, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, exponent = x >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = x & ((1 << mantissa_bits) - 1);
  float y = exponent ? std::ldexp(float(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits)
                     : std::ldexp(float(mantissa), 1 - bias - mantissa_bits);
  if (exponent == (1 << exponent_bits) - 1) y = mantissa ? NAN : INFINITY;
  return x & 0x8000 ? -y : y;
}

template <int exponent_bits, int mantissa_bits>
struct Float16 {
  Float16() = default;
  Float16(float x) : bits(round_16(x, exponent_bits, mantissa_bits)) {}
  operator float() const {
    static const auto* const all = [] {
      auto* table = new std::vector<float>(1 << 16);
      for (unsigned n = 0; n < table->size(); ++n)
        (*table)[n] = widen_16(std::uint16_t(n), exponent_bits, mantissa_bits);
      return table->data();
    }();
    return all[bits];
  }
  std::uint16_t bits;
};
}  // namespace emulator

using half = emulator::Float16<5, 10>;
using __nv_bfloat16 = emulator::Float16<8, 7>;
inline float __half2float(half x) { return x; }
inline half __float2half(float x) { return x; }

#include "emulator_ptx.h"
