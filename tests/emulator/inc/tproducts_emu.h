// replaces cuda/hopper/transposed_products.cuh
#pragma once
#include "cuda/hopper/instructions.cuh"
namespace anyflash::cuda {
inline void products_commit() {}
template <int g> void products_wait_for() {}
template <int k> void keep(float (&)[k][4]) {}
template <bool kTA, bool kTB, int tiles, class E> void multiply(float (&c)[tiles][4], std::uint32_t a, std::uint32_t b, bool sum, E) {
  const int w = emu::warp() % 4, g = emu::lane() / 4, t = emu::lane() % 4;
  float x[2][16];
  for (int h = 0; h < 2; ++h) for (int k = 0; k < 16; ++k) x[h][k] = operand<E>(a, kTA, w * 16 + g + 8 * h, k);
  for (int j = 0; j < tiles; ++j) for (int e = 0; e < 2; ++e) {
    double s[2] = {};
    for (int k = 0; k < 16; ++k) { const double y = operand<E>(b, kTB, 8 * j + 2 * t + e, k); s[0] += x[0][k] * y, s[1] += x[1][k] * y; }
    for (int h = 0; h < 2; ++h) { float& z = c[j][2 * h + e]; z = float((sum ? double(z) : 0.0) + s[h]); }
  }
}
template <bool kTB, int tiles, class E> void multiply(float (&c)[tiles][4], const std::uint32_t (&a)[4], std::uint32_t b, bool sum, E) {
  MmaShare own{{a[0], a[1], a[2], a[3]}, {}};
  auto* all = emu::share(own);
  const int g = emu::lane() / 4, t = emu::lane() % 4;
  float x[2][16];
  for (int h = 0; h < 2; ++h) for (int k = 0; k < 16; ++k) x[h][k] = number(std::uint16_t(emu::of<MmaShare>(all, g * 4 + k % 8 / 2).a[h + 2 * (k / 8)] >> 16 * (k % 2)), E());
  for (int j = 0; j < tiles; ++j) for (int e = 0; e < 2; ++e) {
    double s[2] = {};
    for (int k = 0; k < 16; ++k) { const double y = operand<E>(b, kTB, 8 * j + 2 * t + e, k); s[0] += x[0][k] * y, s[1] += x[1][k] * y; }
    for (int h = 0; h < 2; ++h) { float& z = c[j][2 * h + e]; z = float((sum ? double(z) : 0.0) + s[h]); }
  }
}
inline void store_matrices(void* row, const std::uint32_t (&from)[4]) {
  struct S { void* row; std::uint32_t x[4]; } own{row, {from[0], from[1], from[2], from[3]}};
  auto* all = emu::share(own);
  for (int m = 0; m < 4; ++m) memcpy(static_cast<char*>(emu::of<S>(all, 8 * m + emu::lane() / 4).row) + 4 * (emu::lane() % 4), &from[m], 4);
}
inline void store_matrices_transposed(void* row, const std::uint32_t (&from)[4]) {
  struct S { void* row; } own{row};
  auto* all = emu::share(own);
  const int g = emu::lane() / 4, t = emu::lane() % 4;
  for (int m = 0; m < 4; ++m) for (int e = 0; e < 2; ++e) {
    const auto x = std::uint16_t(from[m] >> 16 * e);
    memcpy(static_cast<char*>(emu::of<S>(all, 8 * m + 2 * t + e).row) + 2 * g, &x, 2);
  }
}
inline void add_to_memory(float* to, const float (&x)[4]) { for (int i = 0; i < 4; ++i) to[i] += x[i]; }
}
