// Memory that outlives calls: of plans that are gone, where a GPU's memory is full, and streams' counters. No GPU is
// needed: what the run-time library does is done here, in the CPU's memory, and is written down.
#include "cuda/common/lasting_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/common/memory.h"
#include "cuda/common/stream_counters.h"

namespace {

int full = 0;          ///< so many of the pools' next allocations fail
bool no_byte = false;  ///< cudaMalloc fails
int current = 0;       ///< device
int waits = 0;         ///< for the device
int stream_waits = 0;
int refused = 0;                              ///< so many of the pools' next settings fail
auto captured = cudaStreamCaptureStatusNone;  ///< all streams
std::uintptr_t pools = 0;
auto capture_mode = cudaStreamCaptureModeGlobal;  ///< the thread's
cudaError_t last = cudaSuccess;
struct Freed {
  void* data;
  cudaStream_t stream;
  int waits;
};
std::vector<Freed> freed;
struct Trimmed {
  cudaMemPool_t pool;
  int waits;
};
std::vector<Trimmed> trimmed;

cudaError_t fail(cudaError_t status) { return last = status; }
cudaStream_t stream_of(std::uintptr_t number) { return reinterpret_cast<cudaStream_t>(number); }

CUresult no_context(CUcontext*, CUdevice) { return CUDA_SUCCESS; }

}  // namespace

extern "C" {
cudaError_t cudaGetLastError() { return std::exchange(last, cudaSuccess); }
const char* cudaGetErrorString(cudaError_t) { return "no more"; }
cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 2, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  properties->major = 9;
  properties->pageableMemoryAccessUsesHostPageTables = device == 1;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes*, const void*) { return fail(cudaErrorInvalidValue); }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return std::swap(*mode, capture_mode), cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = captured, cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return *stream = stream_of(1), cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return ++stream_waits, cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = nullptr, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaHostAlloc(void**, std::size_t, unsigned) { return fail(cudaErrorMemoryAllocation); }
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  if (captured != cudaStreamCaptureStatusNone) return captured = cudaStreamCaptureStatusInvalidated, cudaErrorUnknown;
  return *id = reinterpret_cast<std::uintptr_t>(stream), cudaSuccess;
}
cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  if (no_byte) return fail(cudaErrorMemoryAllocation);
  return *data = std::malloc(bytes), cudaSuccess;
}
cudaError_t cudaFree(void* data) { return ++waits, std::free(data), cudaSuccess; }
cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps*) {
  return *pool = reinterpret_cast<cudaMemPool_t>(++pools), cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  if (capture_mode != cudaStreamCaptureModeRelaxed) return fail(cudaErrorStreamCaptureUnsupported);
  return refused > 0 ? --refused, fail(cudaErrorUnknown) : cudaSuccess;
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t bytes) {
  if (bytes == 0) trimmed.push_back({pool, waits});
  return cudaSuccess;
}
cudaError_t cudaMallocFromPoolAsync(void** data, std::size_t bytes, cudaMemPool_t, cudaStream_t) {
  if (full > 0) return --full, fail(cudaErrorMemoryAllocation);
  return *data = std::memset(std::malloc(bytes), 0xa5, bytes), cudaSuccess;
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
  freed.push_back({data, stream, waits});
  return std::free(data), cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&no_context), *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* found) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, found);
}
}

namespace anyflash::cuda {
namespace {

void nothing(void*, cudaStream_t) {}

/// A block of a plan that is gone, which calls on these streams read.
const void* leave(std::initializer_list<cudaStream_t> streams) {
  LastingMemory memory(0);
  const void* const block = memory.add(64, nothing);
  for (const auto stream : streams) memory.read_on(stream);
  return block;
}

std::vector<Freed> freed_since(std::size_t before) { return {freed.begin() + before, freed.end()}; }

/// Nothing is left of another test.
class LastingMemoryTest : public testing::Test {
 protected:
  void SetUp() override { free_left_memory(0); }
};

TEST_F(LastingMemoryTest, GoesInTheOrderOfTheStreamThatReadIt) {
  const auto before = freed.size();
  const auto waited = waits;
  const auto block = leave({stream_of(11), stream_of(11)});
  LastingMemory other(0);
  other.read_on(stream_of(12));
  EXPECT_EQ(freed.size(), before);
  other.read_on(stream_of(11));
  const auto now = freed_since(before);
  ASSERT_EQ(now.size(), 1u);
  EXPECT_EQ(now[0].data, block);
  EXPECT_EQ(now[0].stream, stream_of(11));
  EXPECT_EQ(waits, waited);
}

TEST_F(LastingMemoryTest, OfManyStreamsGoesBehindAWait) {
  const auto before = freed.size();
  const auto waited = waits;
  for (int i = 0; i < 1025; ++i) leave({stream_of(11), stream_of(12)});
  EXPECT_EQ(waits, waited + 1);
  const auto now = freed_since(before);
  EXPECT_EQ(now.size(), 1025u);
  for (const auto& one : now) EXPECT_EQ(one.waits, waited + 1);
}

/// The last byte that can be had is the one to wait by.
TEST_F(LastingMemoryTest, OfAFullGpuIsMadeUseOfBehindAWait) {
  const auto block = leave({stream_of(11)});
  const auto before = freed.size();
  const auto waited = waits;
  full = 1, no_byte = true;
  LastingMemory(0).add(64, nothing);
  no_byte = false;
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(waits, waited + 1);
  const auto now = freed_since(before);
  const auto found = std::find_if(now.begin(), now.end(), [&](const Freed& one) { return one.data == block; });
  ASSERT_NE(found, now.end());
  EXPECT_EQ(found->waits, waited + 1);
  leave({stream_of(13)});  // there is such a byte again
  full = 1;
  const StreamMemory of_a_call(64, stream_of(14));
  EXPECT_NE(of_a_call.get(), nullptr);
  EXPECT_EQ(waits, waited + 2);
}

/// What calls gave back behind their kernels is a pool's again when these are done.
TEST_F(LastingMemoryTest, OfAFullGpuIsWhatBothPoolsKeepBehindAWait) {
  const std::function<void()> calls[] = {[] { LastingMemory(0).add(64, nothing); },
                                         [] { StreamMemory(64, stream_of(14)); }};
  for (const auto& call : calls) {
    const auto waited = waits;
    trimmed.clear();
    full = 1;
    call();
    EXPECT_EQ(waits, waited + 1);
    ASSERT_EQ(trimmed.size(), 2u);
    EXPECT_EQ(trimmed[0].pool, pool_of(0));
    EXPECT_EQ(trimmed[1].pool, lasting_pool_of(0));
    EXPECT_NE(pool_of(0), lasting_pool_of(0));
    for (const auto& one : trimmed) EXPECT_EQ(one.waits, waited + 1);
  }
}

/// Where there has been no plan, and the memory is full before it is asked for.
TEST_F(LastingMemoryTest, OfAFullGpuIsWhatCallsAloneLeftBehindAWait) {
  current = 1;
  StreamMemory(64, stream_of(14));
  const auto waited = waits;
  full = 1, no_byte = true;
  StreamMemory(64, stream_of(14));
  EXPECT_EQ(waits, waited + 1);
  no_byte = false;
  free_left_memory(1);  // finds the byte for another run
  current = 0;
}

TEST_F(LastingMemoryTest, StaysWhereNobodyCanWait) {
  leave({stream_of(11)});
  full = 1, no_byte = true;
  leave({stream_of(12)});  // uses the byte up
  const auto before = freed.size();
  full = 2;
  EXPECT_THROW(LastingMemory(0).add(64, nothing), Error);
  EXPECT_EQ(freed.size(), before);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  no_byte = false;
}

/// It may be the first call of a process, while another thread captures.
TEST_F(LastingMemoryTest, PoolsAreMadeOutsideOfCapturesAndOnce) {
  const auto before = pools;
  refused = 1;
  EXPECT_THROW(pool_of(2), Error);
  EXPECT_EQ(capture_mode, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(pool_of(2), pool_of(2));
  EXPECT_EQ(pools, before + 1);
}

/// A device that reads the CPU's memory itself may do so after the call has returned. There is no pinned memory.
TEST_F(LastingMemoryTest, WhatIsBroughtIsWaitedForWhereItIsNotCopiedAside) {
  const auto write = [](char* memory) { *reinterpret_cast<int*>(memory) = 5; };
  for (const int device : {0, 1}) {
    int to = 0;
    const auto waited = stream_waits;
    bring(&to, sizeof(to), write, device, stream_of(11), "bringing");
    EXPECT_EQ(to, 5);
    EXPECT_EQ(stream_waits, waited + device);
  }
}

std::int32_t* counters_of(int device, std::uintptr_t stream) { return StreamCounters(device, stream_of(stream)).get(); }

TEST(StreamCounters, AreZerosOfEachStreamsOwn) {
  std::set<std::int32_t*> found;
  for (const int device : {3, 4})
    for (std::uintptr_t stream = 100; stream < 1100; ++stream) {
      auto* const own = counters_of(device, stream);
      ASSERT_NE(own, nullptr) << stream;
      EXPECT_TRUE(found.insert(own).second) << "two streams have the same";
      EXPECT_EQ(own[0] | own[1] | own[2], 0);
      own[0] = own[1] = own[2] = 1;
    }
  EXPECT_EQ(counters_of(3, 1100), nullptr) << "there is room for a thousand";
  EXPECT_TRUE(found.count(counters_of(3, 100))) << "a stream keeps its own";
}

TEST(StreamCounters, AreNotForCapturesNorForWhatIsAnotherStreamInEachThread) {
  EXPECT_NE(counters_of(5, 100), nullptr);
  captured = cudaStreamCaptureStatusActive;
  EXPECT_EQ(counters_of(5, 100), nullptr);
  EXPECT_EQ(captured, cudaStreamCaptureStatusActive) << "invalidated";
  captured = cudaStreamCaptureStatusNone;
  EXPECT_EQ(StreamCounters(5, cudaStreamPerThread).get(), nullptr);
}

/// The call has its workspace. It is not asked again, since that would wait for the device.
TEST(StreamCounters, AreNotWithoutMemoryWhichIsAskedForOnce) {
  full = 2;
  EXPECT_EQ(counters_of(6, 100), nullptr);
  EXPECT_EQ(full, 0);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(counters_of(6, 100), nullptr);
}

/// Another thread's kernels do not come between a call's, but those of other streams may.
TEST(StreamCounters, AreHeldWhileTheyExist) {
  auto held = std::make_unique<StreamCounters>(7, stream_of(100));
  EXPECT_NE(counters_of(7, 101), nullptr);
  std::atomic<bool> begun = false, done = false;
  std::thread other([&] {
    begun = true;
    StreamCounters(7, stream_of(100));
    done = true;
  });
  while (!begun) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(done);
  StreamCounters moved = std::move(*held);
  EXPECT_EQ(held->get(), nullptr);
  EXPECT_NE(moved.get(), nullptr);
  held.reset();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(done) << "what is moved from holds nothing";
  moved = StreamCounters();
  other.join();
  EXPECT_TRUE(done);
}

}  // namespace
}  // namespace anyflash::cuda
