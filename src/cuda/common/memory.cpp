#include "cuda/common/memory.h"

#include <array>
#include <cstdint>
#include <mutex>

#include "cuda/common/device.h"
#include "cuda/common/lasting_memory.h"

namespace anyflash::cuda {
namespace {

class Pools {
 public:
  /// kept: bytes of freed memory that the pool keeps. waits: a stream may get memory that another stream has freed but
  /// still uses, and then waits for it.
  cudaMemPool_t of(int device, std::uint64_t kept, bool waits) {
    std::call_once(made_[device], [&] {
      const OutsideOfCaptures outside;
      cudaMemPoolProps properties{};
      properties.allocType = cudaMemAllocationTypePinned;
      properties.location.type = cudaMemLocationTypeDevice;
      properties.location.id = device;
      auto& pool = pools_[device];
      if (!pool) check(cudaMemPoolCreate(&pool, &properties), "making a pool of device memory");
      check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &kept), "keeping device memory");
      int allowed = waits;
      check(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &allowed),
            "making a pool of device memory");
      prepare_to_free(device);
    });
    return pools_[device];
  }

 private:
  std::array<std::once_flag, most_devices> made_;
  std::array<cudaMemPool_t, most_devices> pools_{};  // never destroyed: calls may still come while the process ends
};

constexpr std::uint64_t megabyte = 1 << 20;

}  // namespace

cudaMemPool_t pool_of(int device) {
  static Pools pools;
  return pools.of(device, 512 * megabyte, true);
}

cudaMemPool_t lasting_pool_of(int device) {
  static Pools pools;
  return pools.of(device, 64 * megabyte, false);
}

void bring(void* to, const void* from, std::size_t bytes, int device, cudaStream_t stream, const char* what) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), what);
  // On other devices the source is copied aside before the call returns.
  if (facts_of({DeviceKind::cuda, device}).reads_host_pages) check(cudaStreamSynchronize(stream), what);
}

StreamMemory::StreamMemory(std::size_t bytes, cudaStream_t stream) : stream_(stream) {
  if (bytes == 0) return;
  int device = 0;
  check(cudaGetDevice(&device), "asking for the current device");
  auto status = cudaMallocFromPoolAsync(&data_, bytes, pool_of(device), stream);
  if (status == cudaErrorMemoryAllocation && !capturing(stream)) {
    cudaGetLastError();
    free_left_memory(device);
    status = cudaMallocFromPoolAsync(&data_, bytes, pool_of(device), stream);
  }
  check(status, "allocating device memory");
}

}  // namespace anyflash::cuda
