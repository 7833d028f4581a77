// Strides on a GPU that Python's arrays there do not have, or not in reach of a test: backwards along an axis, and over
// more than 2^31 elements.
#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

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

const auto all_types =
    testing::Values(ElementType::float16, ElementType::bfloat16, ElementType::float32, ElementType::float64);

INSTANTIATE_TEST_SUITE_P(All, GpuStrides,
                         testing::Combine(all_types, testing::Values(1, 70), testing::Values(40, 64),
                                          testing::Values(1, 2, 4, 8, 15)));

/// What lies at each place of an axis, without gaps in both.
void copy_parts(const TensorView& to, const TensorView& from, int axis) {
  const auto size = static_cast<std::int64_t>(element_size(to.type));
  const auto bytes = to.elements() / to.shape[axis] * size;
  for (std::int64_t i = 0; i < to.shape[axis]; ++i)
    EXPECT_EQ(cudaMemcpy(static_cast<char*>(to.data) + i * to.strides[axis] * size,
                         static_cast<const char*>(from.data) + i * from.strides[axis] * size, bytes, cudaMemcpyDefault),
              cudaSuccess);
}

/// Tensors in two places: without gaps, and with the last place of an axis far from the first. Those lie in the gaps of
/// one another: 4 GB of 16-bit numbers, 9 GB of float32, 17 GB of float64. Of the last two axes one is contiguous:
/// the last, unless that is the one.
class FarTensors {
 public:
  std::vector<TensorView> near, apart;

  /// places: of a tensor whose last one is more than 2^31 elements behind its first; longest: of any.
  FarTensors(ElementType type, int axis, std::int64_t places, std::int64_t longest)
      : type_(type),
        axis_(axis),
        // Of whole vectors: others are for kernels that add up in another order.
        step_(far / (places - 1) / 8 * 8 + 8),
        memory_(ElementType::uint8, {2, (step_ * (longest - 1) + (1 << 20)) * std::int64_t(element_size(type)) / 2},
                0) {}

  /// Of sines, or of zeros where `seed` is negative.
  void add(std::int64_t b, std::int64_t h, std::int64_t rows, std::int64_t columns, double seed = -1) {
    if (axis_ == 3) std::swap(rows, columns);
    twins_.emplace_back(type_, std::initializer_list{b, h, rows, columns}, seed);
    auto view = twins_.back().cuda;
    if (axis_ == 3) std::swap(view.shape[2], view.shape[3]), std::swap(view.strides[2], view.strides[3]);
    near.push_back(view);
    view.strides[axis_] = step_;
    view.data = static_cast<char*>(memory_.view.data) + next_ * std::int64_t(element_size(type_));
    next_ += view.elements() / view.shape[axis_];
    apart.push_back(view);
    copy_parts(view, near.back(), axis_);
  }

  void expect_same(int result) const {
    const auto found = bytes_of(result, apart[result]);
    EXPECT_TRUE(found == bytes_of(result, near[result])) << "result " << result;
    EXPECT_TRUE(std::any_of(found.begin(), found.end(), [](char c) { return c != 0; })) << "result " << result;
  }

 private:
  static constexpr std::int64_t far = (std::int64_t{1} << 31) + (1 << 20);

  std::vector<char> bytes_of(int number, const TensorView& view) const {
    std::vector<char> bytes(static_cast<std::size_t>(view.elements()) * element_size(type_));
    auto host = near[number];
    host.data = bytes.data();
    copy_parts(host, view, axis_);
    return bytes;
  }

  ElementType type_;
  int axis_;
  std::int64_t step_, next_ = 0;
  Tensor memory_;
  std::vector<Twins> twins_;
};

using Far = std::tuple<ElementType, std::int64_t, int, bool>;  // queries, axis, `deterministic`

/// So many that dQ is the same bits even without `deterministic`: for a query there is one sum to add, to zero.
constexpr std::int64_t one_block = 64;

class GpuFar : public testing::TestWithParam<Far> {};

/// Batch entries, heads, rows or channels: the same bits as beside each other.
TEST_P(GpuFar, Apart) {
  const auto [type, n, axis, deterministic] = GetParam();
  const std::int64_t m = deterministic ? 150 : one_block, d = 64;
  const std::int64_t b = axis == 0 ? 2 : 1, h = axis == 1 ? 2 : 1;
  const auto statistic = type == ElementType::float64 ? type : ElementType::float32;
  const Tensor lse(statistic, {b, h, n}, 0), far_lse(statistic, {b, h, n}, 0);
  const std::int64_t places = axis == 3 ? d : axis == 2 ? m : 2;
  FarTensors tensors(type, axis, places, axis == 2 ? std::max(n, m) : places);
  for (const auto rows : {n, m, m, n, n, n, m, m}) {  // q, k, v, dout, out, dq, dk, dv
    const auto made = tensors.near.size();
    tensors.add(b, h, rows, d, made < 4 ? double(made) : -1.0);
  }
  Options options;
  options.rule = causal();
  options.align = Align::none_end;
  options.deterministic = deterministic;
  const auto run = [&](const std::vector<TensorView>& at, const TensorView& rows) {
    forward(at[0], at[1], at[2], {at[4], rows, {}, {}}, options);
    backward({at[3], at[4], rows, {}}, at[0], at[1], at[2], {at[5], at[6], at[7], {}, {}}, options);
  };
  run(tensors.near, lse.view);
  run(tensors.apart, far_lse.view);
  EXPECT_EQ(far_lse.bytes(), lse.bytes());
  for (int result = 4; result < 8; ++result) tensors.expect_same(result);
}

INSTANTIATE_TEST_SUITE_P(All, GpuFar,
                         testing::Combine(all_types, testing::Values(1, 70), testing::Values(0, 1, 2, 3),
                                          testing::Bool()));

class GpuFarBias : public testing::TestWithParam<Far> {};

/// Of a bias and its gradient, with rows of whole vectors in both places.
TEST_P(GpuFarBias, Apart) {
  const auto [type, n, axis, deterministic] = GetParam();
  const std::int64_t m = deterministic ? 152 : one_block, d = 64;
  const std::int64_t b = axis == 0 ? 2 : 1, h = axis == 1 ? 2 : 1;
  const auto statistic = type == ElementType::float64 ? type : ElementType::float32;
  const auto q = Tensor::of_sines(type, {b, h, n, d}, 0), k = Tensor::of_sines(type, {b, h, m, d}, 1);
  const auto v = Tensor::of_sines(type, {b, h, m, d}, 2), dout = Tensor::of_sines(type, {b, h, n, d}, 3);
  const std::int64_t places = axis == 3 ? m : axis == 2 ? n : 2;
  FarTensors tensors(type, axis, places, places);
  tensors.add(b, h, n, m, 4);
  tensors.add(b, h, n, m);
  Options options;
  options.rule = causal();
  options.align = Align::none_end;
  options.deterministic = deterministic;
  std::vector<std::vector<unsigned char>> expected;
  for (const auto* at : {&tensors.near, &tensors.apart}) {
    const Tensor out(type, {b, h, n, d}, 0), lse(statistic, {b, h, n}, 0);
    const Tensor dq(type, {b, h, n, d}, 0), dk(type, {b, h, m, d}, 0), dv(type, {b, h, m, d}, 0);
    options.bias = at->front();
    forward(q.view, k.view, v.view, {out.view, lse.view, {}, {}}, options);
    backward({dout.view, out.view, lse.view, {}}, q.view, k.view, v.view, {dq.view, dk.view, dv.view, at->back(), {}},
             options);
    const std::vector results{out.bytes(), lse.bytes(), dq.bytes(), dk.bytes(), dv.bytes()};
    if (expected.empty()) expected = results;
    EXPECT_TRUE(results == expected);
  }
  tensors.expect_same(1);
}

INSTANTIATE_TEST_SUITE_P(All, GpuFarBias,
                         testing::Combine(all_types, testing::Values(2, 70), testing::Values(0, 1, 2, 3),
                                          testing::Bool()));

}  // namespace
}  // namespace anyflash
