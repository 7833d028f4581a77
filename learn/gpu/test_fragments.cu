// Test of device functions: where the numbers of an mma lie.
//
// One hot number at a time: A has a single 1 at (row, k), B a single 1 at (k, column), so C must have a 1 at (row,
// column) and zeros elsewhere. Lanes fill their fragments by the layout that ptx.h states, and find their numbers of C
// by it. If one index were wrong, some of the products would miss. ldmatrix must then give the same fragments.
#include "ptx.h"

namespace {

// a: (16, 16), b: (16, 8), c: (16, 8). by_ldmatrix: the fragments come from shared memory.
__global__ void multiply(const half* a, const half* b, float* c, int by_ldmatrix) {
  half* const shared = shared_memory<half>();
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const auto pair = [](half low, half high) { return pack(__half2float(low), __half2float(high)); };
  std::uint32_t left[4], right[4];
  for (int n = 0; n < 4; ++n) {
    const half* at = a + (g + n % 2 * 8) * 16 + 2 * t + n / 2 * 8;
    left[n] = pair(at[0], at[1]);
  }
  for (int n = 0; n < 2; ++n) right[n] = pair(b[(2 * t + 8 * n) * 8 + g], b[(2 * t + 8 * n + 1) * 8 + g]);
  if (by_ldmatrix) {
    for (int n = lane; n < 256; n += 32) shared[n] = a[n];
    for (int n = lane; n < 128; n += 32) shared[256 + n] = b[n];
    __syncwarp();
    ldmatrix(left, shared + lane % 16 * 16 + lane / 16 * 8);
    ldmatrix_trans(right, shared + 256 + lane % 16 * 8);  // two matrices; lanes 16 to 31 name them again
  }
  float sums[4] = {};
  mma(sums, left, right[0], right[1]);
  for (int e = 0; e < 4; ++e) c[(g + e / 2 * 8) * 8 + 2 * t + e % 2] = sums[e];
}

}  // namespace

extern "C" const char* test() {
  for (int by_ldmatrix = 0; by_ldmatrix < 2; ++by_ldmatrix)
    for (int n = 0; n < 16; ++n) {
      const int row = n, k = (n * 5 + 3) % 16, column = n * 3 % 8;
      std::vector<half> a(256, half(0.0f)), b(128, half(0.0f));
      a[row * 16 + k] = half(1.0f), b[k * 8 + column] = half(1.0f);
      const DeviceArray<half> left(a), right(b);
      const DeviceArray<float> c(128);
      launch(multiply, 1, 32, 1024, left.data, right.data, c.data, by_ldmatrix);
      const auto got = c.get(128);
      for (int m = 0; m < 128; ++m)
        if (got[m] != (m == row * 8 + column))
          return by_ldmatrix ? "ldmatrix: a number is elsewhere" : "mma: a number is elsewhere";
    }
  return nullptr;
}
