// What Hopper's forward kernel leaves in the counters of a stream: zeros, whatever it met.
// Other kernels leave them alone.
#include "cuda/common/stream_counters.h"

#include <anyflash/attention.h>

#include <array>

#include "cuda/common/device.h"
#include "cuda/portable/args.h"
#include "tensor.h"

namespace anyflash {
namespace {

using Counters = std::array<std::int32_t, 3>;

/// The counters of the stream, which has nothing queued, before they become `next`.
Counters exchange(cudaStream_t stream, const Counters& next) {
  Counters found;
  const cuda::StreamCounters counters(0, stream);
  EXPECT_EQ(cudaMemcpy(found.data(), counters.get(), sizeof(found), cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(counters.get(), next.data(), sizeof(next), cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return found;
}

/// The counters are zeros before a call, or ask for the fallback, as after a call that did not end. Zeros after the
/// second show that the call uses them.
TEST(GpuStreamCounters, AreZerosAfterEachCallOnHopper) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  Options options;
  options.stream = stream;
  for (const auto type : {ElementType::bfloat16, ElementType::float16})
    for (const std::int64_t depth : {64, 128, 256})
      for (const std::int64_t queries : {100, 3000}) {  // keys in parts; more tasks than thread blocks
        const auto q = Tensor::of_sines(type, {1, 16, queries, depth}, 0),
                   k = Tensor::of_sines(type, {1, 16, 3000, depth}, 1);
        for (const int byte : {0x3c, 0xff})  // numbers; NaN
          for (const std::int32_t again : {0, std::int32_t{cuda::kBlocksAgain}}) {
            const Tensor v(type, {1, 16, 3000, depth}, byte), out(type, {1, 16, queries, depth}, 0);
            const Counters before{0, again, 0}, after = cuda::has_groups(gpu) ? Counters{} : before;
            exchange(stream, before);
            forward(q.view, k.view, v.view, {out.view, {}, {}, {}}, options);
            EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            EXPECT_EQ(exchange(stream, {}), after)
                << queries << " queries, " << depth << " channels, byte " << byte << ", before the call " << again;
          }
      }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

}  // namespace
}  // namespace anyflash
