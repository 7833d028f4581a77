#pragma once
#include <functional>
#include <algorithm>
#include <vector>
#include <memory>
#include <string>
#include <map>
#include <optional>
#include <variant>
#include <mutex>
#include <atomic>
#include <cuda_runtime_api.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <math.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __noinline__ // sources say it otherwise
#undef __forceinline__
#define __forceinline__ inline
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
namespace emu {
void yield();
void fail(const char* what);
struct Sync {  // reusable barrier of n threads with two buffers
  int count = 0; unsigned gen = 0; int orr[2] = {0, 0};
};
bool sync(Sync& s, int n, bool one);
extern Sync block_sync, named[16];
extern int named_users;
inline int lane() { return threadIdx.x % 32; }
inline int warp() { return threadIdx.x / 32; }
// gives all lanes' data
char* exchange(const void* data, int bytes);
template <class T> T* share(const T& x) { static_assert(sizeof(T) <= 128); return reinterpret_cast<T*>(exchange(&x, sizeof(T))); }
template <class T> const T& of(const void* all, int l) { return *reinterpret_cast<const T*>(static_cast<const char*>(all) + 128 * l); }
void run(const std::function<void()>& kernel, unsigned blocks, int threads);
template <class F> void launch_with(const F& f, unsigned blocks, int threads) { run(f, blocks, threads); }
}
inline void __syncthreads() { emu::sync(emu::block_sync, blockDim.x, false); }
inline int __syncthreads_or(int x) { return emu::sync(emu::block_sync, blockDim.x, x != 0); }
inline void __syncwarp(unsigned = 0xffffffffu) { int x = 0; emu::share(x); }
template <class T> T __shfl_sync(unsigned, T x, int l) { auto* a = emu::share(x); return emu::of<T>(a, l & 31); }
template <class T> T __shfl_xor_sync(unsigned, T x, int m) { auto* a = emu::share(x); return emu::of<T>(a, emu::lane() ^ m); }
template <class T> T __shfl_up_sync(unsigned, T x, int m) { auto* a = emu::share(x); return emu::lane() >= m ? emu::of<T>(a, emu::lane() - m) : x; }
inline unsigned __ballot_sync(unsigned, bool p) { auto* a = emu::share(p); unsigned r = 0; for (int l = 0; l < 32; ++l) r |= unsigned(emu::of<bool>(a, l)) << l; return r; }
inline int __any_sync(unsigned m, bool p) { return __ballot_sync(m, p) != 0; }
inline int __reduce_min_sync(unsigned, int x) { auto* a = emu::share(x); int r = x; for (int l = 0; l < 32; ++l) r = std::min(r, emu::of<int>(a, l)); return r; }
template <class T> T atomicOr(T* p, T x) { T o = *p; *p |= x; return o; }
inline unsigned long long atomicOr(unsigned long long* p, unsigned long long x) { auto o = *p; *p |= x; return o; }
template <class T, class U> T atomicAdd(T* p, U x) { T o = *p; *p += x; return o; }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __int_as_float(int x) { float f; memcpy(&f, &x, 4); return f; }
inline float __uint_as_float(unsigned x) { float f; memcpy(&f, &x, 4); return f; }
inline unsigned __float_as_uint(float x) { unsigned f; memcpy(&f, &x, 4); return f; }
inline double __longlong_as_double(long long x) { double f; memcpy(&f, &x, 8); return f; }
template <class T> T __ldg(const T* p) { return *p; }
inline void __trap() { emu::fail("trap"); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }
inline float min_nan_zero(float x) { return x > 0 ? 0.0f : x; }
#define __CUDA_ARCH_FEAT_SM90_ALL_EMU 1
