// Device memory in the order of a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/common/errors.h"

namespace anyflash::cuda {

/// Memory that exists for what is queued on a stream between its making and its end: nobody waits for either.
class StreamMemory {
 public:
  StreamMemory(std::size_t bytes, cudaStream_t stream) : stream_(stream) {
    if (bytes > 0) check(cudaMallocAsync(&data_, bytes, stream), "allocating device memory");
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
