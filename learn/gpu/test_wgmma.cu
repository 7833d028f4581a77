// Test of device functions: wgmma's descriptors and fragments (sm_90a).
//
// Operands are small whole numbers, so that products are exact and the check is ==. Tiles are stored by ordinary stores
// in the swizzle, with a fence before wgmma reads them. Tried: both operands by descriptor (S = Q K^T), both as columns
// (dQ = dS K), the left one in registers (O = P V), the second half of a panel (a descriptor that begins 64 bytes
// later), and two panels of columns.
#include "ptx.h"

namespace {

constexpr int kDepth = 64;

struct Shared {
  TmaTile<64, 64> a, b;
  TmaTile<64, 128> v;
};

// s = a b^T (64, 64);  o = a v (64, 128), with a from registers;  r = a^T b (64, 64).
__global__ void multiply(const half* a, const half* b, const half* v, float* to_s, float* to_o, float* to_r) {
  Shared& shared = *shared_memory<Shared>();
  for (int n = threadIdx.x; n < 64 * 64; n += 128)
    *shared.a.place(n / 64, n % 64) = a[n], *shared.b.place(n / 64, n % 64) = b[n];
  for (int n = threadIdx.x; n < 64 * 128; n += 128) *shared.v.place(n / 128, n % 128) = v[n];
  fence_async_proxy();
  __syncthreads();
  float s[8][4], r[8][4], o[16][4];
  std::uint32_t left[kDepth / 16][4];
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int k = 0; k < kDepth / 16; ++k)
    for (int n = 0; n < 4; ++n) {
      const half* from = a + (row + n % 2 * 8) * 64 + 16 * k + 2 * t + n / 2 * 8;
      left[k][n] = pack(__half2float(from[0]), __half2float(from[1]));
    }
  wgmma_fence();
  for (int k = 0; k < kDepth; k += 16)
    wgmma_abt(s, descriptor(shared.a.at(0, k), 0), descriptor(shared.b.at(0, k), 0), k > 0);
  for (int k = 0; k < kDepth / 16; ++k)
    wgmma_ab(o, left[k], descriptor(shared.v.at(16 * k, 0), shared.v.kPanel), k > 0);
  for (int k = 0; k < kDepth; k += 16)
    wgmma_atb(r, descriptor(shared.a.at(k, 0), 0), descriptor(shared.b.at(k, 0), 0), k > 0);
  wgmma_commit();
  wgmma_wait<0>(s);
  wgmma_wait<0>(r);
  wgmma_wait<0>(o);
  for (int e = 0; e < 4; ++e) {
    for (int j = 0; j < 8; ++j) {
      const int at = (row + e / 2 * 8) * 64 + 8 * j + 2 * t + e % 2;
      to_s[at] = s[j][e], to_r[at] = r[j][e];
    }
    for (int j = 0; j < 16; ++j) to_o[(row + e / 2 * 8) * 128 + 8 * j + 2 * t + e % 2] = o[j][e];
  }
}

std::vector<half> small_numbers(int count, int seed) {
  std::vector<half> x(count);
  for (int n = 0; n < count; ++n) x[n] = half(float((n * 7 + n / 64 * seed + seed) % 11 - 5));
  return x;
}

}  // namespace

extern "C" const char* test() {
  const auto a = small_numbers(64 * 64, 3), b = small_numbers(64 * 64, 5), v = small_numbers(64 * 128, 2);
  const DeviceArray<half> a_given(a), b_given(b), v_given(v);
  const DeviceArray<float> s(64 * 64), r(64 * 64), o(64 * 128);
  launch(multiply, 1, 128, sizeof(Shared), a_given.data, b_given.data, v_given.data, s.data, o.data, r.data);
  const auto got_s = s.get(64 * 64), got_r = r.get(64 * 64), got_o = o.get(64 * 128);
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < 128; ++j) {
      float right_s = 0, right_r = 0, right_o = 0;
      for (int k = 0; k < kDepth; ++k) {
        if (j < 64) right_s += float(a[i * 64 + k]) * float(b[j * 64 + k]);
        if (j < 64) right_r += float(a[k * 64 + i]) * float(b[k * 64 + j]);
        right_o += float(a[i * 64 + k]) * float(v[k * 128 + j]);
      }
      if (j < 64 && got_s[i * 64 + j] != right_s) return "wgmma_abt: a number is wrong";
      if (j < 64 && got_r[i * 64 + j] != right_r) return "wgmma_atb: a number is wrong";
      if (got_o[i * 128 + j] != right_o) return "wgmma_ab: a number is wrong";
    }
  return nullptr;
}
