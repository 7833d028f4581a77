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

/// What lies at each place of an axis, without gaps in both.
void copy_parts(const TensorView& to, const TensorView& from, int axis) {
  const auto size = static_cast<std::int64_t>(element_size(to.type));
  const auto bytes = to.elements() / to.shape[axis] * size;
  for (std::int64_t i = 0; i < to.shape[axis]; ++i)
    EXPECT_EQ(cudaMemcpy(static_cast<char*>(to.data) + i * to.strides[axis] * size,
                         static_cast<const char*>(from.data) + i * from.strides[axis] * size, bytes,
                         cudaMemcpyDefault),
              cudaSuccess);
}

class GpuFar : public testing::TestWithParam<std::tuple<ElementType, std::int64_t, int>> {};

/// Batch entries, heads or rows (axis 2), the last of them far from the first: the same bits as beside each other. All
/// tensors lie in the gaps of one another: 4 GB of 16-bit numbers, 9 GB of float32.
TEST_P(GpuFar, Apart) {
  constexpr std::int64_t far = (std::int64_t{1} << 31) + (1 << 20), m = 150, d = 64;
  const auto [type, n, axis] = GetParam();
  const std::int64_t b = axis == 0 ? 2 : 1, h = axis == 1 ? 2 : 1;
  // Of rows, too, whole vectors: others are for kernels that add up in another order.
  const std::int64_t step = axis == 2 ? far / (m - 1) / 8 * 8 + 8 : far;
  const auto size = static_cast<std::int64_t>(element_size(type));
  const Tensor memory(ElementType::uint8, {2, (far + (1 << 20)) * size / 2}, 0);
  const Tensor lse(ElementType::float32, {b, h, n}, 0), far_lse(ElementType::float32, {b, h, n}, 0);
  std::vector<Twins> near;
  std::vector<TensorView> apart;
  std::int64_t next = 0;
  for (const auto rows : {n, m, m, n, n, n, m, m}) {  // q, k, v, dout, out, dq, dk, dv
    near.emplace_back(type, std::initializer_list{b, h, rows, d}, near.size() < 4 ? double(near.size()) : -1.0);
    apart.push_back(near.back().cuda);
    apart.back().strides[axis] = step;
    apart.back().data = static_cast<char*>(memory.view.data) + next * size;
    next += (axis == 2 ? 1 : rows) * d;
    copy_parts(apart.back(), near.back().cuda, axis);
  }
  Options options;
  options.rule = causal();
  options.align = Align::none_end;
  options.deterministic = true;
  const auto run = [&](const auto& at, const TensorView& rows) {
    forward(at(0), at(1), at(2), {at(4), rows, {}, {}}, options);
    backward({at(3), at(4), rows, {}}, at(0), at(1), at(2), {at(5), at(6), at(7), {}, {}}, options);
  };
  run([&](int i) { return near[i].cuda; }, lse.view);
  run([&](int i) { return apart[i]; }, far_lse.view);
  const auto bytes_of = [&](const TensorView& view) {
    std::vector<char> bytes(static_cast<std::size_t>(view.elements() * size));
    copy_parts(TensorView(bytes.data(), view.type, {b, h, view.shape[2], d}), view, axis);
    return bytes;
  };
  EXPECT_EQ(far_lse.bytes(), lse.bytes());
  for (int result = 4; result < 8; ++result) {
    const auto found = bytes_of(apart[result]);
    EXPECT_TRUE(found == bytes_of(near[result].cuda)) << "result " << result;
    EXPECT_TRUE(std::any_of(found.begin(), found.end(), [](char c) { return c != 0; })) << "result " << result;
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuFar,
                         testing::Combine(testing::Values(ElementType::bfloat16, ElementType::float32),
                                          testing::Values(1, 70), testing::Values(0, 1, 2)));

}  // namespace
}  // namespace anyflash
