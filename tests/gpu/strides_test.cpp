// Strides on a GPU that Python's arrays there do not have, or not in reach of a test: backwards along an axis, and over
// more than 2^31 elements.
#include <algorithm>
#include <tuple>

#include "twins.h"

namespace anyflash {
namespace {

using Case = std::tuple<ElementType, std::int64_t, std::int64_t, unsigned>;  // queries, channels, axes

class GpuStrides : public testing::TestWithParam<Case> {};

TEST_P(GpuStrides, Backwards) {
  const auto [type, n, d, axes] = GetParam();
  constexpr std::int64_t b = 2, h = 2, m = 150;
  const auto rows = type == ElementType::float64 ? type : ElementType::float32;
  const Twins q(type, {b, h, n, d}, 0, axes), k(type, {b, h, m, d}, 1, axes), v(type, {b, h, m, d}, 2, axes);
  const Twins dout(type, {b, h, n, d}, 3, axes), out(type, {b, h, n, d}, -1, axes), lse(rows, {b, h, n}, -1, axes & 7);
  const Twins dq(type, {b, h, n, d}, -1, axes), dk(type, {b, h, m, d}, -1, axes), dv(type, {b, h, m, d}, -1, axes);
  Options options;
  options.rule = window(40, 5);
  options.align = Align::none_end;
  for (auto place : {&Twins::cpu, &Twins::cuda}) {
    forward(q.*place, k.*place, v.*place, {out.*place, lse.*place, {}, {}}, options);
    backward({dout.*place, out.*place, lse.*place, {}}, q.*place, k.*place, v.*place,
             {dq.*place, dk.*place, dv.*place, {}, {}}, options);
  }
  out.expect_equal("out"), lse.expect_equal("lse");
  dq.expect_equal("dq"), dk.expect_equal("dk"), dv.expect_equal("dv");
}

INSTANTIATE_TEST_SUITE_P(
    All, GpuStrides,
    testing::Combine(testing::Values(ElementType::bfloat16, ElementType::float32, ElementType::float64),
                     testing::Values(1, 70), testing::Values(40, 64), testing::Values(1, 2, 4, 8, 15)));

class GpuFar : public testing::TestWithParam<std::tuple<ElementType, std::int64_t, int>> {};

/// Two batch entries, or heads, far apart: the same bits as beside each other. All tensors lie in the gaps of one
/// another: 4 GB of 16-bit numbers, 9 GB of float32.
TEST_P(GpuFar, Apart) {
  constexpr std::int64_t far = (std::int64_t{1} << 31) + (1 << 20), m = 150, d = 64;
  const auto [type, n, axis] = GetParam();
  const auto twins = [axis = axis, type = type](std::int64_t rows, double seed) {
    return axis == 0 ? Twins(type, {2, 1, rows, d}, seed) : Twins(type, {1, 2, rows, d}, seed);
  };
  const auto size = static_cast<std::int64_t>(element_size(type));
  const Tensor memory(ElementType::uint8, {2, (far + (1 << 20)) * size / 2}, 0);
  const Tensor lse(ElementType::float32, {2, n}, 0), far_lse(ElementType::float32, {2, n}, 0);
  const auto rows_of = [axis = axis, n = n](const Tensor& tensor) {
    return axis == 0 ? TensorView(tensor.view.data, ElementType::float32, {2, 1, n}, gpu)
                     : TensorView(tensor.view.data, ElementType::float32, {1, 2, n}, gpu);
  };
  std::vector<Twins> near;
  std::vector<TensorView> apart;
  std::int64_t next = 0;
  for (const auto rows : {n, m, m, n, n, n, m, m}) {  // q, k, v, dout, out, dq, dk, dv
    near.push_back(twins(rows, near.size() < 4 ? double(near.size()) : -1.0));
    auto view = near.back().cuda;
    view.strides[axis] = far;
    view.data = static_cast<char*>(memory.view.data) + next * size;
    next += rows * d;
    for (int i = 0; i < 2; ++i) {
      const auto bytes = rows * d * size;
      EXPECT_EQ(
          cudaMemcpy(static_cast<char*>(view.data) + i * far * size,
                     static_cast<const char*>(near.back().cuda.data) + i * bytes, bytes, cudaMemcpyDeviceToDevice),
          cudaSuccess);
    }
    apart.push_back(view);
  }
  Options options;
  options.rule = causal();
  options.align = Align::none_end;
  options.deterministic = true;
  const auto run = [&](const auto& at, const TensorView& rows) {
    forward(at(0), at(1), at(2), {at(4), rows, {}, {}}, options);
    backward({at(3), at(4), rows, {}}, at(0), at(1), at(2), {at(5), at(6), at(7), {}, {}}, options);
  };
  run([&](int i) { return near[i].cuda; }, rows_of(lse));
  run([&](int i) { return apart[i]; }, rows_of(far_lse));
  EXPECT_EQ(far_lse.bytes(), lse.bytes());
  for (int result = 4; result < 8; ++result) {
    const auto bytes = apart[result].shape[2] * d * size;
    std::vector<char> expected(2 * bytes), found(2 * bytes);
    EXPECT_EQ(cudaMemcpy(expected.data(), near[result].cuda.data, 2 * bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    for (int i = 0; i < 2; ++i)
      EXPECT_EQ(cudaMemcpy(found.data() + i * bytes, static_cast<const char*>(apart[result].data) + i * far * size,
                           bytes, cudaMemcpyDeviceToHost),
                cudaSuccess);
    EXPECT_TRUE(found == expected) << "result " << result;
    EXPECT_TRUE(std::any_of(found.begin(), found.end(), [](char c) { return c != 0; })) << "result " << result;
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuFar,
                         testing::Combine(testing::Values(ElementType::bfloat16, ElementType::float32),
                                          testing::Values(1, 70), testing::Values(0, 1)));

}  // namespace
}  // namespace anyflash
