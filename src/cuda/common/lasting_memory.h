// Device memory that outlives calls: what plans that are kept have on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>
#include <mutex>
#include <vector>

namespace anyflash::cuda {

/// The stream that calls were on, by a number that no other stream ever has; or that they were on several, or on one
/// that cannot be told from others.
class StreamUsed {
 public:
  StreamUsed() = default;
  explicit StreamUsed(cudaStream_t stream);
  void add(const StreamUsed& other) { id_ = id_ == none || id_ == other.id_ ? other.id_ : many; }
  /// Were all on that of the other?
  bool is(const StreamUsed& other) const { return id_ == other.id_ && id_ != many; }

 private:
  static constexpr unsigned long long none = ~0ull, many = none - 1;

  unsigned long long id_ = none;
};

struct LastingBlock {
  void* data;
  std::size_t bytes;
};

/// Makes the next possible, while there is memory. The device is the calling thread's.
void prepare_to_free(int device);

/// Gives back the memory of blocks that nobody holds any more, when the device, which is the calling thread's, has done
/// what was queued, and what the library's pools keep unused. Streams may be captured meanwhile.
void free_left_memory(int device);

/// Blocks that are written once and read by calls on any streams. They must outlive the making of those calls, not
/// their work: behind that they are given back, by the next call on the stream if one had all. What no such call comes
/// for, or several streams had, is given back behind a wait for the device, once there is much of it.
class LastingMemory {
 public:
  explicit LastingMemory(int device) : device_(device) {}
  ~LastingMemory();
  LastingMemory(const LastingMemory&) = delete;
  LastingMemory& operator=(const LastingMemory&) = delete;

  /// Another block. The device is the calling thread's. work(block, stream) puts there what it is to hold, on a stream
  /// of its own, so that a stream of the caller's may be captured meanwhile; it is waited for. Throws Error if there is
  /// no memory.
  const void* add(std::size_t bytes, const std::function<void(void*, cudaStream_t)>& work);

  /// A call on the stream, which is not captured, is going to read them. In the stream's order, what others left behind
  /// that was read there is given back.
  void read_on(cudaStream_t stream);

 private:
  int device_;
  std::mutex mutex_;
  std::vector<LastingBlock> blocks_;
  StreamUsed stream_;
};

}  // namespace anyflash::cuda
