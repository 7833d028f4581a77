// Device memory that outlives calls: what kept plans have on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

namespace anyflash::cuda {

using StreamId = unsigned long long;
/// An id that no other stream of the process ever has. None for cudaStreamPerThread, which is another stream in each
/// thread. Not for a stream in capture: the question would invalidate the capture.
std::optional<StreamId> lasting_id(cudaStream_t stream);

/// The stream that calls used, by its id. Or the fact that they used several streams, or one without an id.
class StreamUsed {
 public:
  StreamUsed() = default;
  explicit StreamUsed(cudaStream_t stream) : id_(lasting_id(stream).value_or(many)) {}
  void add(const StreamUsed& other) { id_ = id_ == none || id_ == other.id_ ? other.id_ : many; }
  /// Did all calls use the other's stream?
  bool is(const StreamUsed& other) const { return id_ == other.id_ && id_ != many; }

 private:
  static constexpr StreamId none = ~0ull, many = none - 1;

  StreamId id_ = none;
};

struct LastingBlock {
  void* data;
  std::size_t bytes;
};

/// Makes free_left_memory possible; call it while there is memory. The device is the calling thread's.
void prepare_to_free(int device);

/// Frees blocks without an owner, once the device has done what was queued, and the unused memory of the library's
/// pools. The device is the calling thread's. Streams may be in capture at the same time.
void free_left_memory(int device);

/// Blocks that are written once and read by calls on any streams. They must outlive the launch of those calls, not
/// their work: they are freed behind it. If all calls were on one stream, the next call on it frees them in stream
/// order. Otherwise they are freed after a wait for the device, once there are many.
class LastingMemory {
 public:
  explicit LastingMemory(int device) : device_(device) {}
  ~LastingMemory();
  LastingMemory(const LastingMemory&) = delete;
  LastingMemory& operator=(const LastingMemory&) = delete;

  /// Adds a block. The device is the calling thread's. work(block, stream) fills it, on a stream of its own, so that
  /// the caller's streams may be in capture; the work is waited for. Throws Error if there is no memory.
  const void* add(std::size_t bytes, const std::function<void(void*, cudaStream_t)>& work);

  /// Notes that a call on the stream, which is not in capture, is going to read the blocks. Frees blocks without an
  /// owner that were read on that stream, in stream order.
  void read_on(cudaStream_t stream);

 private:
  int device_;
  std::mutex mutex_;
  std::vector<LastingBlock> blocks_;
  StreamUsed stream_;
};

}  // namespace anyflash::cuda
