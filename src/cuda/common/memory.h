// Device memory in the order of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/common/errors.h"

namespace anyflash::cuda {

/// The library's own pool of a device's memory, which keeps some of what is given back: a call then takes what the last
/// one had, and asks nobody.
cudaMemPool_t pool_of(int device);

/// Memory that exists for what is queued on a stream between its making and its end: nobody waits for either.
class StreamMemory {
 public:
  StreamMemory(std::size_t bytes, cudaStream_t stream) : stream_(stream) {
    if (bytes == 0) return;
    int device = 0;
    check(cudaGetDevice(&device), "asking for the current device");
    check(cudaMallocFromPoolAsync(&data_, bytes, pool_of(device), stream), "allocating device memory");
  }
  ~StreamMemory() {
    if (data_) cudaFreeAsync(data_, stream_);
  }
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;

  char* get() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_;
};

/// Is what goes to the stream being recorded for a CUDA graph?
inline bool capturing(cudaStream_t stream) {
  auto status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "asking whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace anyflash::cuda
