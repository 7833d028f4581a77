// Memory of plans that are gone, which several streams read: it goes when all of them have done what they read it for.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "cuda/common/errors.h"
#include "cuda/common/lasting_memory.h"

namespace anyflash::cuda {
namespace {

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream"); }
  ~Stream() { give_back(cudaStreamDestroy(stream_)); }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

std::atomic<bool> awake;

void sleep_a_while(void*) {
  std::this_thread::sleep_for(std::chrono::seconds(2));
  awake = true;
}

/// A plan that is gone; one stream will read it to `host`, another has.
void leave(cudaStream_t one, cudaStream_t other, void* host) {
  LastingMemory memory(0);
  const void* data = memory.add(
      64, [](void* block, cudaStream_t stream) { check(cudaMemsetAsync(block, 7, 64, stream), "filling a block"); });
  memory.read_on(other);
  memory.read_on(one);
  check(cudaMemcpyAsync(host, data, 64, cudaMemcpyDeviceToHost, one), "reading a block");
}

TEST(LastingMemory, WaitsForAStreamThatSleeps) {
  Stream sleeping, other;
  void* locked = nullptr;  // pages, or copies there would wait
  check(cudaMallocHost(&locked, 128), "taking memory of the host");
  const auto host = static_cast<char*>(locked);
  for (int i = 0; i < 1023; ++i) leave(other, sleeping, host + 64);
  std::memset(host, 0, 64);
  awake = false;
  check(cudaLaunchHostFunc(sleeping, sleep_a_while, nullptr), "letting a stream sleep");
  leave(sleeping, other, host);
  EXPECT_FALSE(awake) << "this machine is too slow for this test";
  leave(other, sleeping, host + 64);  // more than are left to lie
  EXPECT_TRUE(awake);
  EXPECT_EQ(cudaStreamQuery(sleeping), cudaSuccess);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(host[i], 7);
  check(cudaFreeHost(locked), "giving back memory of the host");
}

}  // namespace
}  // namespace anyflash::cuda
