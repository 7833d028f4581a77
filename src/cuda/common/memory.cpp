#include "cuda/common/memory.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <mutex>
#include <vector>

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

/// Pinned memory in which numbers wait for their copy to a device. Copies from other memory of the CPU wait until the
/// stream has come to them.
class PinnedMemory {
 public:
  /// Returns false, with nothing done, if all of it is in use. The device is the calling thread's.
  bool bring(void* to, std::size_t bytes, const std::function<void(char*)>& write, cudaStream_t stream,
             const char* what) {
    const OutsideOfCaptures outside;
    const std::lock_guard lock(mutex_);
    const auto* const part = part_of(bytes);
    if (!part) return false;
    write(static_cast<char*>(part->data));
    check(cudaMemcpyAsync(to, part->data, bytes, cudaMemcpyHostToDevice, stream), what);
    check(cudaEventRecord(part->copied, stream), what);
    return true;
  }

 private:
  static constexpr std::size_t least_bytes = 256 << 10, most_bytes = 32 << 20;

  struct Part {
    void* data = nullptr;
    std::size_t bytes = 0;
    cudaEvent_t copied = nullptr;
  };

  /// A part of that size that is not in use; null if there is none and no room for another.
  const Part* part_of(std::size_t bytes) {
    if (bytes > most_bytes) return nullptr;
    Part part;
    part.bytes = std::max(std::bit_ceil(bytes), least_bytes);
    const bool room = bytes_ + part.bytes <= most_bytes;
    for (auto known = parts_.begin(); known != parts_.end(); ++known) {
      if (known->bytes < bytes) continue;
      if (cudaEventQuery(known->copied) == cudaSuccess) {
        std::rotate(known, known + 1, parts_.end());
        return &parts_.back();
      }
      cudaGetLastError();
      if (room) break;  // those used later are hardly free
    }
    if (!room) return nullptr;
    if (cudaEventCreateWithFlags(&part.copied, cudaEventDisableTiming) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    if (cudaHostAlloc(&part.data, part.bytes, cudaHostAllocDefault) != cudaSuccess) {
      cudaGetLastError();
      give_back(cudaEventDestroy(part.copied));
      return nullptr;
    }
    bytes_ += part.bytes;
    return &parts_.emplace_back(part);
  }

  std::mutex mutex_;
  std::vector<Part> parts_;  // in the order of their last use
  std::size_t bytes_ = 0;
};

PinnedMemory& pinned_memory(int device) {
  static auto& all = *new std::array<PinnedMemory, most_devices>;  // never destroyed: the process may be ending
  return all[device];
}

}  // namespace

cudaMemPool_t pool_of(int device) {
  static Pools pools;
  return pools.of(device, 512 * megabyte, true);
}

cudaMemPool_t lasting_pool_of(int device) {
  static Pools pools;
  return pools.of(device, 64 * megabyte, false);
}

void bring(void* to, std::size_t bytes, const std::function<void(char*)>& write, int device, cudaStream_t stream,
           const char* what) {
  if (bytes == 0 || pinned_memory(device).bring(to, bytes, write, stream, what)) return;
  std::vector<char> from(bytes);
  write(from.data());
  check(cudaMemcpyAsync(to, from.data(), bytes, cudaMemcpyHostToDevice, stream), what);
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
