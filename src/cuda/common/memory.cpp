#include "cuda/common/memory.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <list>
#include <mutex>
#include <utility>
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
/// stream has come to them. It is a small block, and a large one once that is full. Neither is freed, since the driver
/// may wait for the device then. Their parts are used again once they have been copied.
class PinnedMemory {
 public:
  /// Returns false, with nothing done, if there is no room. The device is the calling thread's.
  bool bring(void* to, std::size_t bytes, const std::function<void(char*)>& write, cudaStream_t stream,
             const char* what) {
    const OutsideOfCaptures outside;
    const std::lock_guard lock(mutex_);
    for (auto& block : blocks_) {
      const auto* const part = block.part_of(bytes);
      if (!part) continue;
      char* const data = block.data + part->begin;
      write(data);
      check(cudaMemcpyAsync(to, data, bytes, cudaMemcpyHostToDevice, stream), what);
      check(cudaEventRecord(part->copied, stream), what);
      return true;
    }
    return false;
  }

 private:
  struct Part {
    std::size_t begin, end;  // in its block
    cudaEvent_t copied;
  };

  struct Block {
    const std::size_t bytes;
    char* data = nullptr;
    std::list<Part> parts{};           // that may be in use, in the order of their use
    std::vector<cudaEvent_t> spare{};  // events of no part

    /// A part that is not in use; null if there is no room.
    const Part* part_of(std::size_t wanted) {
      const auto size = (wanted + unit - 1) / unit * unit;
      if (size > bytes || !allocated()) return nullptr;
      while (!parts.empty() && free_if_copied(parts.begin())) {
      }
      auto begin = place_of(size);
      if (begin == none) {  // of several streams, later ones may be done
        for (auto part = parts.begin(); part != parts.end();) free_if_copied(part++);
        begin = place_of(size);
      }
      if (begin == none) return nullptr;
      if (spare.empty()) {
        cudaEvent_t event = nullptr;
        if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) {
          cudaGetLastError();
          return nullptr;
        }
        spare.push_back(event);
      }
      parts.push_back({begin, begin + size, spare.back()});
      spare.pop_back();
      return &parts.back();
    }

   private:
    static constexpr std::size_t unit = 64 << 10, none = ~std::size_t{0};

    bool allocated() {
      void* memory = nullptr;
      if (!data && cudaHostAlloc(&memory, bytes, cudaHostAllocDefault) == cudaSuccess)
        data = static_cast<char*>(memory);
      else if (!data) cudaGetLastError();
      return data != nullptr;
    }

    bool free_if_copied(std::list<Part>::iterator part) {
      if (cudaEventQuery(part->copied) != cudaSuccess) {
        cudaGetLastError();
        return false;
      }
      spare.push_back(part->copied);
      parts.erase(part);
      return true;
    }

    /// Where so many bytes are in no part.
    std::size_t place_of(std::size_t size) const {
      std::vector<std::pair<std::size_t, std::size_t>> used;
      for (const auto& part : parts) used.emplace_back(part.begin, part.end);
      std::sort(used.begin(), used.end());
      std::size_t begin = 0;
      for (const auto& [first, end] : used) {
        if (first - begin >= size) break;
        begin = end;
      }
      return bytes - begin >= size ? begin : none;
    }
  };

  std::mutex mutex_;
  std::array<Block, 2> blocks_{{{2 * megabyte}, {32 * megabyte}}};
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
