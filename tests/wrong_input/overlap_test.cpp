// Which tensors overlap themselves, against a list of all their places.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "problem/checks.h"

namespace anyflash::problem {
namespace {

TEST(Overlap, IsFoundWhereAnElementsPlaceIsTaken) {
  std::mt19937 random(1);
  const auto draw = [&](int least, int most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  int overlapping = 0;
  constexpr int tensors = 20000;
  for (int i = 0; i < tensors; ++i) {
    TensorView view;
    view.rank = static_cast<int>(draw(1, 4));
    std::set<std::int64_t> places{0};
    for (int axis = 0; axis < view.rank; ++axis) {
      view.shape[axis] = draw(1, 5), view.strides[axis] = draw(-20, 20);
      std::set<std::int64_t> more;
      for (const auto place : places)
        for (std::int64_t at = 0; at < view.shape[axis]; ++at) more.insert(place + at * view.strides[axis]);
      places = std::move(more);
    }
    const bool overlaps = static_cast<std::int64_t>(places.size()) < view.elements();
    overlapping += overlaps;
    ASSERT_EQ(overlaps_itself(view), overlaps)
        << text_of({view.shape.data(), 4}) << " " << text_of({view.strides.data(), 4}) << " rank " << view.rank;
  }
  EXPECT_TRUE(overlapping > tensors / 10 && overlapping < tensors * 9 / 10) << overlapping;
}

}  // namespace
}  // namespace anyflash::problem
