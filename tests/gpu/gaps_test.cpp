// Results with gaps between their rows on a GPU: each element is written, and no byte of a gap.
#include <tuple>
#include <vector>

#include "tensor.h"

namespace anyflash {
namespace {

using Case = std::tuple<ElementType, std::int64_t, std::int64_t, std::int64_t>;  // queries, channels, a gap's

class GpuGaps : public testing::TestWithParam<Case> {};

TEST_P(GpuGaps, StayAsTheyWere) {
  const auto [type, queries, depth, gap] = GetParam();
  constexpr std::int64_t heads = 2, keys = 150;
  constexpr int pattern = 0xa5;
  const Tensor q(type, {1, heads, queries, depth}, 0x3c), k(type, {1, heads, keys, depth}, 0x3b);
  const Tensor lse(type == ElementType::float64 ? type : ElementType::float32, {1, heads, queries}, 0);
  // A head has one row more than it shows.
  const auto rows = [&](std::int64_t n) { return Tensor(type, {1, heads, n + 1, depth + gap}, pattern); };
  const auto shown = [&](const Tensor& tensor) {
    const auto& [batch, head, row, channel] =
        std::tie(tensor.view.strides[0], tensor.view.strides[1], tensor.view.strides[2], tensor.view.strides[3]);
    return TensorView(tensor.view.data, type, {1, heads, tensor.view.shape[2] - 1, depth}, {batch, head, row, channel},
                      gpu);
  };
  const Tensor out = rows(queries), dq = rows(queries), dk = rows(keys), dv = rows(keys);
  Options options;
  options.rule = causal();
  forward(q.view, k.view, k.view, {shown(out), lse.view, {}, {}}, options);
  backward({q.view, shown(out), lse.view, {}}, q.view, k.view, k.view, {shown(dq), shown(dk), shown(dv), {}, {}},
           options);
  for (const auto* tensor : {&out, &dq, &dk, &dv}) {
    const auto bytes = tensor->bytes();
    const auto size = static_cast<std::int64_t>(element_size(type)), row = (depth + gap) * size;
    const auto head = tensor->view.shape[2] * row;
    std::int64_t gaps = 0, written = 0, changed = 0, left = 0;
    for (std::int64_t i = 0; i < heads * head; i += size) {
      bool same = true;
      for (std::int64_t byte = 0; byte < size; ++byte) same &= bytes[i + byte] == pattern;
      const bool is_gap = i % row >= depth * size || i % head >= head - row;
      ++(is_gap ? gaps : written);
      changed += is_gap && !same;
      left += !is_gap && same;
    }
    EXPECT_GT(gaps, 0);
    EXPECT_GT(written, 0);
    EXPECT_EQ(changed, 0);
    EXPECT_EQ(left, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuGaps,
                         testing::Combine(testing::Values(ElementType::float16, ElementType::bfloat16,
                                                          ElementType::float32, ElementType::float64),
                                          testing::Values(1, 100, 300), testing::Values(19, 64, 128, 200, 256),
                                          testing::Values(0, 3, 8)));

}  // namespace
}  // namespace anyflash
