// Pinned memory that tables go through (memory.cpp). No GPU is needed: what the run-time library does is done here, on
// streams whose work is done when the test says so.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "cuda/common/memory.h"

namespace {

struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
};

std::map<cudaStream_t, std::vector<Copy>> queued;                      ///< of each stream
std::map<cudaEvent_t, std::pair<cudaStream_t, std::size_t>> recorded;  ///< after so many copies of a stream
std::map<cudaStream_t, std::size_t> done;
std::map<const void*, std::size_t> pinned;  ///< bytes of each block
std::uintptr_t events = 0;
int pageable = 0;  ///< copies of other memory

bool is_pinned(const void* data) {
  const auto block = pinned.upper_bound(data);
  if (block == pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(block);
  return static_cast<const char*>(data) < static_cast<const char*>(begin) + bytes;
}

/// The stream does what was queued.
void finish(cudaStream_t stream) {
  auto& copies = queued[stream];
  for (auto& i = done[stream]; i < copies.size(); ++i) std::memcpy(copies[i].to, copies[i].from, copies[i].bytes);
}

cudaStream_t stream_of(std::uintptr_t number) { return reinterpret_cast<cudaStream_t>(number); }

}  // namespace

extern "C" {
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "no more"; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 2, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  properties->major = 9;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes*, const void*) { return cudaErrorInvalidValue; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return *stream = stream_of(99), cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (is_pinned(from)) return queued[stream].push_back({to, from, bytes}), cudaSuccess;
  return ++pageable, std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  *data = std::malloc(bytes);
  return pinned[*data] = bytes, cudaSuccess;
}
cudaError_t cudaFreeHost(void*) { return ADD_FAILURE() << "may wait for the device", cudaErrorUnknown; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = reinterpret_cast<cudaEvent_t>(++events), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return recorded[event] = {stream, queued[stream].size()}, cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto [stream, copies] = recorded[event];
  return done[stream] >= copies ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  return *id = reinterpret_cast<std::uintptr_t>(stream), cudaSuccess;
}
cudaError_t cudaMalloc(void** data, std::size_t bytes) { return *data = std::malloc(bytes), cudaSuccess; }
cudaError_t cudaFree(void* data) { return std::free(data), cudaSuccess; }
cudaError_t cudaMemPoolCreate(cudaMemPool_t*, const cudaMemPoolProps*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) { return cudaSuccess; }
cudaError_t cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t, cudaStream_t) {
  return *data = std::malloc(bytes), cudaSuccess;
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t) { return std::free(data), cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void**, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  return cudaErrorUnknown;
}
cudaError_t cudaGetDriverEntryPoint(const char*, void**, unsigned long long, cudaDriverEntryPointQueryResult*) {
  return cudaErrorUnknown;
}
}

namespace anyflash::cuda {
namespace {

constexpr std::size_t KiB = 1 << 10, MiB = 1 << 20;

/// Tables that are brought, and whether each arrives as it was written.
class PinnedMemoryTest : public testing::Test {
 protected:
  void TearDown() override {
    for (const auto stream : {stream_of(1), stream_of(2)}) finish(stream);
    for (std::size_t i = 0; i < arrived_.size(); ++i) {
      ASSERT_EQ(arrived_[i].front(), static_cast<char>(i)) << "table " << i;
      ASSERT_EQ(arrived_[i].back(), static_cast<char>(i)) << "table " << i;
    }
  }
  /// Did the copy go through pinned memory?
  bool brings(std::size_t bytes, cudaStream_t stream = stream_of(1)) {
    const auto before = pageable;
    auto& to = arrived_.emplace_back(bytes);
    const auto value = static_cast<int>(arrived_.size() - 1);
    bring(to.data(), bytes, [&](char* data) { std::memset(data, value, bytes); }, 0, stream, "bringing");
    return pageable == before;
  }

 private:
  std::vector<std::vector<char>> arrived_;
};

TEST_F(PinnedMemoryTest, LargeTablesFitAfterSmallOnes) {
  EXPECT_TRUE(brings(100));
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(brings(20 * MiB)) << i;
    finish(stream_of(1));
    EXPECT_TRUE(brings(32 * MiB)) << i;
    finish(stream_of(1));
  }
  EXPECT_FALSE(brings(32 * MiB + 1));
}

TEST_F(PinnedMemoryTest, ManySmallTablesTakeNoRoomForGood) {
  int small = 0;
  while (brings(100)) ++small;
  EXPECT_GE(small, 512);
  finish(stream_of(1));
  EXPECT_TRUE(brings(32 * MiB));
  EXPECT_TRUE(brings(100));
}

TEST_F(PinnedMemoryTest, CopiesInTheQueueAreNotOverwritten) {
  for (int i = 0; i < 400; ++i) {
    brings(i % 7 == 0 ? 5 * MiB : 300 * KiB, stream_of(1 + i % 2));
    if (i % 5 == 0) finish(stream_of(1 + i / 5 % 2));
  }
}

TEST_F(PinnedMemoryTest, AStreamThatIsBehindHoldsOnlyItsOwnPart) {
  EXPECT_TRUE(brings(4 * MiB, stream_of(1)));
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(brings(20 * MiB, stream_of(2))) << i;
    finish(stream_of(2));
  }
}

TEST_F(PinnedMemoryTest, MemoryIsNeverMoreThanTwoBlocks) {
  for (int i = 0; i < 2000; ++i) brings(100 * KiB);
  std::size_t bytes = 0;
  for (const auto& block : pinned) bytes += block.second;
  EXPECT_LE(bytes, 34 * MiB);
  EXPECT_LE(pinned.size(), 2u);
}

}  // namespace
}  // namespace anyflash::cuda
