#include "cuda/common/lasting_memory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <utility>

#include "cuda/common/device.h"
#include "cuda/common/errors.h"
#include "cuda/common/memory.h"

namespace anyflash::cuda {
namespace {

class OwnStream {
 public:
  OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream for a plan"); }
  ~OwnStream() { give_back(cudaStreamDestroy(stream_)); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Blocks on a GPU without an owner, which queued work may still read.
class LeftBlocks {
 public:
  void prepare() {
    const std::unique_lock lock(freeing_, std::try_to_lock);
    if (lock) find_byte();  // else another thread does it
  }

  /// True if there are so many now that they should be freed.
  bool add(const std::vector<LastingBlock>& blocks, const StreamUsed& stream) {
    const std::lock_guard lock(mutex_);
    for (const auto& block : blocks) blocks_.push_back({block, stream}), bytes_ += block.bytes;
    any_ = !blocks_.empty();
    return blocks_.size() > most_blocks || bytes_ > most_bytes;
  }

  /// Frees the blocks of one stream, in its order.
  void free_of(const StreamUsed& used, cudaStream_t stream) {
    if (!any_.load(std::memory_order_relaxed)) return;
    for (const auto& block : taken([&](const Left& left) { return left.stream.is(used); }))
      give_back(cudaFreeAsync(block.data, stream));
  }

  /// Frees all blocks, once the device has done what was queued on any stream. It waits even if there are no blocks,
  /// since calls' memory returns to its pool only then. The device is the calling thread's. Concurrent callers wait
  /// until the blocks are freed.
  void free_all() {
    const std::lock_guard lock(freeing_);
    const OwnStream stream;
    if (!find_byte()) return;  // no allocation to wait with
    const auto blocks = taken([](const Left&) { return true; });
    check(cudaFree(std::exchange(byte_, nullptr)), "waiting for a device");
    for (const auto& block : blocks) give_back(cudaFreeAsync(block.data, stream));
    check(cudaStreamSynchronize(stream), "giving back device memory");
    find_byte();
  }

 private:
  static constexpr std::size_t most_blocks = 1024, most_bytes = 256 << 20;

  struct Left {
    LastingBlock block;
    StreamUsed stream;
  };

  template <class Which>
  std::vector<LastingBlock> taken(const Which& which) {
    std::vector<LastingBlock> found;
    const std::lock_guard lock(mutex_);
    const auto rest = std::partition(blocks_.begin(), blocks_.end(), [&](const Left& left) { return !which(left); });
    for (auto left = rest; left != blocks_.end(); ++left) found.push_back(left->block), bytes_ -= left->block.bytes;
    blocks_.erase(rest, blocks_.end());
    any_ = !blocks_.empty();
    return found;
  }

  bool find_byte() {
    if (!byte_ && cudaMalloc(&byte_, 1) != cudaSuccess) cudaGetLastError();
    return byte_;
  }

  std::mutex mutex_, freeing_;
  std::vector<Left> blocks_;
  std::size_t bytes_ = 0;
  std::atomic<bool> any_ = false;
  void* byte_ = nullptr;  ///< freeing it waits for the device, which is allowed while streams are captured
};

LeftBlocks& left_on(int device) {
  static auto& all = *new std::array<LeftBlocks, most_devices>;  // never destroyed: plans may go at exit
  return all[device];
}

}  // namespace

std::optional<StreamId> lasting_id(cudaStream_t stream) {
  StreamId id = 0;
  if (stream == cudaStreamPerThread) return {};
  if (cudaStreamGetId(stream, &id) == cudaSuccess) return id;
  cudaGetLastError();
  return {};
}

void prepare_to_free(int device) {
  const OutsideOfCaptures outside;
  left_on(device).prepare();
}

void free_left_memory(int device) {
  const OutsideOfCaptures outside;
  left_on(device).free_all();
  for (const auto pool : {pool_of(device), lasting_pool_of(device)})
    check(cudaMemPoolTrimTo(pool, 0), "giving back device memory");
}

LastingMemory::~LastingMemory() {
  try {
    if (!left_on(device_).add(blocks_, stream_)) return;
    const DeviceScope scope(device_);
    const OutsideOfCaptures outside;
    left_on(device_).free_all();
  } catch (const std::exception&) {  // the process is ending and releases its memory anyway
  }
}

const void* LastingMemory::add(std::size_t bytes, const std::function<void(void*, cudaStream_t)>& work) {
  const OutsideOfCaptures outside;
  const OwnStream stream;
  struct Attempt {
    cudaStream_t stream;
    void* data = nullptr;
    ~Attempt() {
      if (data) give_back(cudaFreeAsync(data, stream));
    }
  } attempt{stream};
  prepare_to_free(device_);
  const auto pool = lasting_pool_of(device_);
  auto status = cudaMallocFromPoolAsync(&attempt.data, bytes, pool, stream);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    free_left_memory(device_);
    status = cudaMallocFromPoolAsync(&attempt.data, bytes, pool, stream);
  }
  check(status, "allocating device memory for a plan");
  work(attempt.data, stream);
  check(cudaStreamSynchronize(stream), "bringing a plan to the device");
  const std::lock_guard lock(mutex_);
  blocks_.push_back({attempt.data, bytes});
  return std::exchange(attempt.data, nullptr);
}

void LastingMemory::read_on(cudaStream_t stream) {
  const StreamUsed used(stream);
  left_on(device_).free_of(used, stream);
  const std::lock_guard lock(mutex_);
  stream_.add(used);
}

}  // namespace anyflash::cuda
