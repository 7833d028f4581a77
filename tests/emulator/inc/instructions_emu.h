// replaces cuda/common/instructions.cuh
#pragma once
#include <emu.h>
namespace anyflash::cuda {
extern char memory[];
inline std::uint32_t shared_address(const void* p) {
  auto d = static_cast<const char*>(p) - memory;
  if (d < 0 || d >= 232448) emu::fail("not shared memory");
  return static_cast<std::uint32_t>(d);
}
inline unsigned lane_number() { return threadIdx.x % 32; }
inline void copy_16(void* to, const void* from) { if (uintptr_t(to) % 16 || uintptr_t(from) % 16) emu::fail("align"); memcpy(to, from, 16); }
inline void copy_8(void* to, const void* from) { memcpy(to, from, 8); }
inline void copy_16(void* to, const void* from, int bytes) { char x[16] = {}; memcpy(x, from, bytes); memcpy(to, x, 16); }
inline void copies_commit() {}
template <int k> void copies_wait() {}
inline void wait_for_kernel_before() {}
inline void let_next_kernel_begin() {}
inline void wait_for_threads(int b, int n) { emu::sync(emu::named[b], n, false); }
inline bool any_of_threads(int b, int n, bool one) { return emu::sync(emu::named[b], n, one); }
inline void load_matrices(std::uint32_t (&to)[4], const void* row) {
  auto* a = emu::share(row);
  for (int m = 0; m < 4; ++m) {
    const char* r = static_cast<const char*>(emu::of<const void*>(a, 8 * m + emu::lane() / 4));
    memcpy(&to[m], r + 4 * (emu::lane() % 4), 4);
  }
}
inline void load_matrices_transposed(std::uint32_t (&to)[4], const void* row) {
  auto* a = emu::share(row);
  const int g = emu::lane() / 4, t = emu::lane() % 4;
  for (int m = 0; m < 4; ++m) {
    std::uint16_t x[2];
    for (int e = 0; e < 2; ++e) memcpy(&x[e], static_cast<const char*>(emu::of<const void*>(a, 8 * m + 2 * t + e)) + 2 * g, 2);
    to[m] = x[0] | std::uint32_t{x[1]} << 16;
  }
}
inline float number(std::uint16_t x, __nv_bfloat16) { return __uint_as_float(unsigned{x} << 16); }
inline float number(std::uint16_t x, __half) { __half_raw r; r.x = x; return __half2float(__half(r)); }
struct MmaShare { std::uint32_t a[4], b[2]; };
template <class E> void multiply_16(float (&c01)[2], float (&c23)[2], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1, E) {
  MmaShare own{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  auto* all = emu::share(own);
  const int g = emu::lane() / 4, t = emu::lane() % 4;
  const auto A = [&](int r, int k) { const auto& s = emu::of<MmaShare>(all, r % 8 * 4 + k % 8 / 2); return number(std::uint16_t(s.a[r / 8 + 2 * (k / 8)] >> 16 * (k % 2)), E()); };
  const auto B = [&](int k, int n) { const auto& s = emu::of<MmaShare>(all, n * 4 + k % 8 / 2); return number(std::uint16_t(s.b[k / 8] >> 16 * (k % 2)), E()); };
  for (int h = 0; h < 2; ++h) for (int e = 0; e < 2; ++e) {
    double sum = 0;
    for (int k = 0; k < 16; ++k) sum += double(A(g + 8 * h, k)) * double(B(k, 2 * t + e));
    float& c = h ? c23[e] : c01[e];
    c = float(double(c) + sum);
  }
}
inline void multiply_64(double (&c)[2], double a, double b) {
  struct S { double a, b; } own{a, b};
  auto* all = emu::share(own);
  const int g = emu::lane() / 4, t = emu::lane() % 4;
  for (int e = 0; e < 2; ++e) for (int k = 0; k < 4; ++k) c[e] += emu::of<S>(all, g * 4 + k).a * emu::of<S>(all, (2 * t + e) * 4 + k).b;
}
inline float exp2_approximately(float x) { float y = exp2f(x); return fabsf(y) < 1.17549435e-38f ? 0.0f : y; }
}
