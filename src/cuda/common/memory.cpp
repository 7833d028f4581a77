#include "cuda/common/memory.h"

#include <array>
#include <cstdint>
#include <mutex>

#include "cuda/common/device.h"

namespace anyflash::cuda {
namespace {

constexpr std::uint64_t kept_bytes = std::uint64_t{512} << 20;

}  // namespace

cudaMemPool_t pool_of(int device) {
  static std::array<std::once_flag, most_devices> made;
  static std::array<cudaMemPool_t, most_devices> pools;  // never destroyed: calls may still come while the process ends
  std::call_once(made[device], [&] {
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device;
    check(cudaMemPoolCreate(&pools[device], &properties), "making a pool of device memory");
    auto kept = kept_bytes;
    check(cudaMemPoolSetAttribute(pools[device], cudaMemPoolAttrReleaseThreshold, &kept), "keeping device memory");
  });
  return pools[device];
}

}  // namespace anyflash::cuda
