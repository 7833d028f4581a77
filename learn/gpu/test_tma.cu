// Test of device functions: TMA's boxes, its swizzle and an mbarrier's phases (sm_90a).
//
// A tensor whose numbers say where they are: row * 64 + column. Two boxes are loaded one after the other into the same
// place, the second one half beyond the tensor: the barrier is used for both phases. Each number must lie where the
// swizzle says, of the right row; rows beyond the tensor must be zeros, though another head follows there.
#include "ptx.h"

namespace {

constexpr int kRows = 16, kBox = 16;

__global__ void copy_boxes(const __grid_constant__ CUtensorMap map, half* to) {
  half* const tile = shared_memory<half>();
  Barrier& full = *reinterpret_cast<Barrier*>(tile + kBox * 64);
  if (threadIdx.x == 0) full.init(1), fence_barrier_init();
  __syncthreads();
  for (int n = 0; n < 2; ++n) {
    if (threadIdx.x == 0) {
      full.arrive_expect(kBox * 128);
      tma_load(tile, map, full, 64, 8 * n, 1);  // the second 64 channels, rows 8 n to 8 n + 15, of head 1
    }
    full.wait(n);
    for (int i = threadIdx.x; i < kBox * 64; i += blockDim.x) to[n * kBox * 64 + i] = tile[i];
    __syncthreads();
  }
}

}  // namespace

extern "C" const char* test() {
  std::vector<half> x;
  for (int head = 0; head < 3; ++head)
    for (int row = 0; row < kRows; ++row)
      for (int c = 0; c < 128; ++c) x.push_back(half(float(head == 1 ? row * 64 + c % 64 + (c < 64 ? 1024 : 0) : -1)));
  const DeviceArray<half> given(x), to(2 * kBox * 64);
  launch(copy_boxes, 1, 64, 4096, tensor_map(given.data, 3, kRows, 128, kBox), to.data);
  const auto got = to.get(2 * kBox * 64);
  for (int n = 0; n < 2; ++n)
    for (int row = 0; row < kBox; ++row)
      for (int c = 0; c < 64; ++c) {
        const float here = got[n * kBox * 64 + row * 64 + (c / 8 ^ row % 8) * 8 + c % 8];
        const bool inside = row + 8 * n < kRows;
        if (inside && here != float((row + 8 * n) * 64 + c)) return "TMA: a number lies elsewhere";
        if (!inside && here != 0) return "TMA: a row beyond the tensor is not zeros";
      }
  return nullptr;
}
