// An error that another caller of CUDA has left behind is not taken for a call's own, and stays for whoever asks for
// it: but for a kernel's first call, since cudaFuncSetAttribute takes it away (CUDA 13.0). A GPU that is too old is
// refused.
#include "cuda/common/device.h"
#include "tensor.h"

namespace anyflash {
namespace {

class GpuErrors : public testing::TestWithParam<ElementType> {};

TEST_P(GpuErrors, LeftBehindByOthersAreNotACallsOwn) {
  const auto type = GetParam();
  const Tensor q(type, {1, 2, 100, 64}, 0x3c), none(type, {1, 2, 0, 64}, 0), out(type, {1, 2, 100, 64}, 0);
  const Tensor lse(ElementType::float32, {1, 2, 100}, 0), dq(type, {1, 2, 100, 64}, 0);
  const Tensor sink(ElementType::float32, {2}, 0x3c), dsink(ElementType::float32, {2}, 0);
  const Tensor lengths(ElementType::int32, {1}, 1);  // more than there are keys, so all
  for (const bool prepared : {false, true}) {
    void* nothing = nullptr;
    ASSERT_EQ(cudaMalloc(&nothing, std::size_t{1} << 60), cudaErrorMemoryAllocation);
    for (const bool late : {false, true}) {  // masks that are found on the GPU
      Options options;
      options.rule = prefix(37);
      options.sink = sink.view;
      if (late) options.key_lengths = lengths.view;
      EXPECT_NO_THROW(forward(q.view, q.view, q.view, {out.view, lse.view, {}, {}}, options));
      EXPECT_NO_THROW(backward({q.view, out.view, lse.view, {}}, q.view, q.view, q.view,
                               {dq.view, {}, {}, {}, dsink.view}, options));
    }
    EXPECT_NO_THROW(forward(q.view, none.view, none.view, {out.view, lse.view, {}, {}}));  // results are filled in
    const auto left = cudaGetLastError();
    if (prepared) {
      EXPECT_EQ(left, cudaErrorMemoryAllocation);
    }
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST(GpuErrors, AGpuThatIsTooOld) {
  EXPECT_NO_THROW(cuda::check_supported(gpu, {"Tesla T4", 7, 5, 40, 65536}));
  try {
    cuda::check_supported(gpu, {"Tesla V100", 7, 0, 80, 98304});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "cuda:0: Tesla V100 of compute capability 7.0, expected 7.5 or newer");
    EXPECT_EQ(error.kind(), Error::Kind::unsupported);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuErrors, testing::Values(ElementType::bfloat16, ElementType::float32));

}  // namespace
}  // namespace anyflash
