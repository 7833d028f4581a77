// Device memory in the order of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <forward_list>

#include "cuda/common/errors.h"
#include "cuda/common/memory_parts.h"

namespace anyflash::cuda {

/// Is what goes to the stream being recorded for a CUDA graph?
inline bool capturing(cudaStream_t stream) {
  auto status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "asking whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

/// In its scope calls are allowed that captures forbid: another thread, or this one, may be capturing a stream.
class OutsideOfCaptures {
 public:
  OutsideOfCaptures() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "leaving the capture mode"); }
  ~OutsideOfCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideOfCaptures(const OutsideOfCaptures&) = delete;
  OutsideOfCaptures& operator=(const OutsideOfCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// The library's own pool of a device's memory, which keeps some of what is given back: a call then takes what the last
/// one had, and asks nobody. The device is the calling thread's.
cudaMemPool_t pool_of(int device);

/// Another one, for memory that outlives calls: nothing that is taken from it waits for another stream's work.
cudaMemPool_t lasting_pool_of(int device);

/// Brings numbers from the CPU's memory to a device's, on a stream that is not captured. They may go when it returns.
void bring(void* to, const void* from, std::size_t bytes, int device, cudaStream_t stream, const char* what);

/// Memory that exists for what is queued on a stream between its making and its end: nobody waits for either.
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

/// What a call works in, part by part: the caller's memory, or its own in the stream's order.
class CallMemory {
 public:
  /// given: the caller's, as much as all parts take, or null.
  CallMemory(char* given, cudaStream_t stream) : given_(given != nullptr), parts_(given), stream_(stream) {}

  /// From a multiple of 256 bytes on; null for no bytes.
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
