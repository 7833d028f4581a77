// Stream-ordered device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <forward_list>
#include <functional>

#include "cuda/common/errors.h"
#include "cuda/common/memory_parts.h"

namespace anyflash::cuda {

/// Is the stream being captured for a CUDA graph?
inline bool capturing(cudaStream_t stream) {
  auto status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "asking whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

/// In its scope calls that captures forbid are allowed, while this or another thread captures a stream.
class OutsideOfCaptures {
 public:
  OutsideOfCaptures() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "leaving the capture mode"); }
  ~OutsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideOfCaptures(const OutsideOfCaptures&) = delete;
  OutsideOfCaptures& operator=(const OutsideOfCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// The library's own pool on a device. It keeps some freed memory, so that a call can reuse the last one's without
/// asking the driver. The device is the calling thread's.
cudaMemPool_t pool_of(int device);

/// A second pool, for memory that outlives calls: allocations from it never wait for another stream's work.
cudaMemPool_t lasting_pool_of(int device);

/// Copies numbers to a device's memory, on a stream that is not in capture: write(memory) writes so many bytes. It waits
/// for the stream only if copies that are still queued leave no room in pinned memory, 32 MiB of it and 2 for few bytes.
void bring(void* to, std::size_t bytes, const std::function<void(char*)>& write, int device, cudaStream_t stream,
           const char* what);

/// Memory that exists for the work queued on a stream between construction and destruction; neither waits.
class StreamMemory {
 public:
  StreamMemory(std::size_t bytes, cudaStream_t stream);
  ~StreamMemory() {
    if (data_) give_back(cudaFreeAsync(data_, stream_));
  }
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  char* get() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_;
};

/// A call's workspace, part by part: the caller's memory, or its own in stream order.
class CallMemory {
 public:
  /// given: the caller's memory, large enough for all parts, or null.
  CallMemory(char* given, cudaStream_t stream) : given_(given != nullptr), parts_(given), stream_(stream) {}

  /// The next part, aligned to 256 bytes; null for no bytes.
  char* take(std::int64_t bytes) {
    if (given_) return parts_.take<char>(bytes);
    return bytes > 0 ? own_.emplace_front(static_cast<std::size_t>(bytes), stream_).get() : nullptr;
  }

 private:
  bool given_;
  MemoryParts parts_;
  cudaStream_t stream_;
  std::forward_list<StreamMemory> own_;
};

}  // namespace anyflash::cuda
