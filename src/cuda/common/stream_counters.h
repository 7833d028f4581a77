// Counters in device memory that calls on a stream hand on to one another, so that no call has to clear them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <mutex>

namespace anyflash::cuda {

/// Bytes of a call's counters where they lie in its workspace, so many that what follows is aligned.
inline constexpr std::int64_t counter_bytes = 256;

/// Three counters of a stream's own: the next task, what the non-finite fallback has to make again, how many of its thread
/// blocks are done. They are 0 whenever none of the stream's calls runs: each call leaves them so. While this exists, no
/// other thread queues kernels that use them.
class StreamCounters {
 public:
  /// The device is the calling thread's. No counters for a stream that is in capture (its graph may run beside it) or
  /// that has no lasting id, nor for streams beyond the first thousand of a device.
  StreamCounters(int device, cudaStream_t stream);
  StreamCounters() = default;

  std::int32_t* get() const { return lock_ ? counters_ : nullptr; }  ///< null: none

 private:
  std::int32_t* counters_ = nullptr;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace anyflash::cuda
