#include "cuda/common/stream_counters.h"

#include <array>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cuda/common/device.h"
#include "cuda/common/lasting_memory.h"
#include "cuda/common/memory.h"

namespace anyflash::cuda {
namespace {

/// The counters of a device's streams.
class DeviceCounters {
 public:
  struct Entry {
    std::mutex mutex;
    std::int32_t* counters;
  };

  /// Null: there is no memory for them.
  Entry* of(int device, StreamId stream) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(stream);
    if (found != streams_.end()) return &found->second;
    if (!memory_) block_ = cleared_block(memory_.emplace(device));
    if (!block_ || streams_.size() == most_streams) return nullptr;
    auto& entry = streams_[stream];
    entry.counters = reinterpret_cast<std::int32_t*>(block_ + (streams_.size() - 1) * bytes_of_stream);
    return &entry;
  }

 private:
  static constexpr std::size_t most_streams = 1000, bytes_of_stream = 128;

  static char* cleared_block(LastingMemory& memory) {
    const std::vector<char> zeros(most_streams * bytes_of_stream);
    // A copy: cudaMemset needs a multiprocessor, and they may all be busy.
    const auto clear = [&](void* block, cudaStream_t stream) {
      check(cudaMemcpyAsync(block, zeros.data(), zeros.size(), cudaMemcpyHostToDevice, stream), "clearing counters");
    };
    try {
      return static_cast<char*>(const_cast<void*>(memory.add(zeros.size(), clear)));
    } catch (const Error&) {
      return nullptr;
    }
  }

  std::mutex mutex_;
  std::optional<LastingMemory> memory_;
  char* block_ = nullptr;
  std::unordered_map<StreamId, Entry> streams_;
};

}  // namespace

StreamCounters::StreamCounters(int device, cudaStream_t stream) {
  static auto& all = *new std::array<DeviceCounters, most_devices>;  // never destroyed: the process may be ending
  if (capturing(stream)) return;
  const auto id = lasting_id(stream);
  auto* const entry = id ? all[device].of(device, *id) : nullptr;
  if (!entry) return;
  lock_ = std::unique_lock(entry->mutex);
  counters_ = entry->counters;
}

}  // namespace anyflash::cuda
