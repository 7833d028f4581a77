// Statistics of rows on a GPU: each is written, the same bits, whichever of the others are asked for. (Python asks for
// all.)
#include <anyflash/attention.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <tuple>
#include <vector>

namespace anyflash {
namespace {

constexpr Device gpu{DeviceKind::cuda, 0};

/// A tensor in the GPU's memory, each of its bytes the same.
struct Tensor {
  TensorView view;
  std::unique_ptr<void, cudaError_t (*)(void*)> memory{nullptr, &cudaFree};

  Tensor(ElementType type, std::initializer_list<std::int64_t> shape, int byte) : view(nullptr, type, shape, gpu) {
    EXPECT_EQ(cudaMalloc(&view.data, bytes()), cudaSuccess);
    memory.reset(view.data);
    EXPECT_EQ(cudaMemset(view.data, byte, bytes()), cudaSuccess);
  }
  std::size_t bytes() const { return static_cast<std::size_t>(view.elements()) * element_size(view.type); }
  std::vector<char> numbers() const {
    std::vector<char> found(bytes());
    EXPECT_EQ(cudaMemcpy(found.data(), view.data, bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
    return found;
  }
};

using Case = std::tuple<ElementType, std::int64_t, std::int64_t>;  // queries, channels

class GpuStatistics : public testing::TestWithParam<Case> {};

TEST_P(GpuStatistics, EachAlone) {
  const auto [type, queries, depth] = GetParam();
  const auto statistic = type == ElementType::float64 ? type : ElementType::float32;
  const Tensor q(type, {1, 2, queries, depth}, 0x3f), k(type, {1, 2, 150, depth}, 0x3c);
  const Tensor v(type, {1, 2, 150, depth}, 0x3f), out(type, {1, 2, queries, depth}, 0);
  Options options;
  options.rule = causal();
  std::vector<std::vector<char>> expected;
  for (int asked = 7; asked > 0; --asked) {  // bits: lse, row_sum, row_max
    std::vector<Tensor> rows;
    for (int i = 0; i < 3; ++i) rows.emplace_back(statistic, std::initializer_list<std::int64_t>{1, 2, queries}, 0xa5);
    const auto given = [&](int i) { return asked >> i & 1 ? rows[i].view : TensorView(); };
    forward(q.view, k.view, v.view, {out.view, given(0), given(1), given(2)}, options);
    for (int i = 0; i < 3; ++i) {
      const auto found = rows[i].numbers();
      if (asked == 7) expected.push_back(found);
      EXPECT_EQ(found, asked >> i & 1 ? expected[i] : std::vector<char>(found.size(), char(0xa5)))
          << "number " << i << " of those asked for, " << asked;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuStatistics,
                         testing::Combine(testing::Values(ElementType::float16, ElementType::bfloat16,
                                                          ElementType::float32, ElementType::float64),
                                          testing::Values(1, 100), testing::Values(64, 72, 128)));

}  // namespace
}  // namespace anyflash
