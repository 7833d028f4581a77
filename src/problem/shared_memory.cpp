// Do two strided tensors have a byte in common, or do two elements of one tensor overlap? Slices of one tensor (dq, dk
// and dv inside a packed gradient) interleave without touching, so it is not enough to compare where tensors begin and
// end.
//
// Byte e of a's element x and byte f of b's element y are the same if low_a + sum_i x_i |s_i| + e = low_b + sum_i y_i
// |t_i| + f. With y_i and f counted from their other end this is  sum of terms x c = distance, 0 <= x <= bound, c > 0.
// It is solved by trying the largest coefficients first. Where strides are nested, as in slices, each term has at most
// two possible values of x. Two elements of one tensor coincide if their indices differ by d_i, not all 0, with sum_i
// d_i |s_i| = 0.
#include <algorithm>
#include <array>

#include "problem/checks.h"

namespace anyflash::problem {
namespace {

struct Term {
  std::int64_t coefficient, bound;
};

struct Terms {
  std::array<Term, 2 * TensorView::max_rank + 1> term;
  std::array<std::int64_t, 2 * TensorView::max_rank + 2> rest{};  // the largest sum of this and all later terms
  int count = 0;
  int trials = 20000;  // enough for any ordinary tensor; if they run out, the answer is yes

  void add(const TensorView& view) {
    for (int i = 0; i < view.rank; ++i) {
      const auto step = std::abs(view.strides[i]) * std::int64_t(element_size(view.type));
      if (view.shape[i] > 1 && step > 0) add({step, view.shape[i] - 1});
    }
  }
  void add(Term added) {
    const auto end = term.begin() + count;
    const auto same = std::find_if(term.begin(), end, [&](Term t) { return t.coefficient == added.coefficient; });
    if (same != end) {
      same->bound += added.bound;
    } else {
      term[count++] = added;
    }
  }
  void sort() {
    std::sort(term.begin(), term.begin() + count, [](Term a, Term b) { return a.coefficient > b.coefficient; });
    for (int i = count - 1; i >= 0; --i) rest[i] = rest[i + 1] + term[i].coefficient * term[i].bound;
  }
  bool reach(int i, std::int64_t distance) {
    if (distance < 0 || distance > rest[i]) return false;
    if (i == count) return distance == 0;
    if (--trials < 0) return true;
    const auto [c, bound] = term[i];
    const auto least = distance > rest[i + 1] ? (distance - rest[i + 1] + c - 1) / c : 0;
    for (auto x = least; x <= std::min(bound, distance / c); ++x) {
      if (reach(i + 1, distance - x * c)) return true;
    }
    return false;
  }
};

}  // namespace

bool overlaps_itself(const TensorView& view) {
  if (is_empty(view)) return false;
  for (int i = 0; i < view.rank; ++i) {
    if (view.shape[i] <= 1) continue;
    if (view.strides[i] == 0) return true;
    // d_i = 1 + x_i; the other d_j = x_j - (size_j - 1). In elements, since two either coincide or do not overlap.
    Terms terms;
    auto distance = -std::abs(view.strides[i]);
    terms.add({-distance, view.shape[i] - 2});
    for (int j = 0; j < view.rank; ++j) {
      if (j == i || view.shape[j] <= 1) continue;
      if (view.strides[j] == 0) return true;
      terms.add({std::abs(view.strides[j]), 2 * (view.shape[j] - 1)});
      distance += std::abs(view.strides[j]) * (view.shape[j] - 1);
    }
    terms.sort();
    if (terms.reach(0, distance)) return true;
  }
  return false;
}

bool share_memory(const TensorView& a, const TensorView& b) {
  const auto extent_a = extent_of(a), extent_b = extent_of(b);
  if (extent_a.high <= extent_b.low || extent_b.high <= extent_a.low) return false;
  if (is_empty(a) || is_empty(b)) return false;
  Terms terms;
  terms.add(a);
  terms.add(b);
  terms.add({1, std::int64_t(element_size(a.type) + element_size(b.type)) - 2});
  terms.sort();
  return terms.reach(0, extent_b.high - 1 - extent_a.low);
}

}  // namespace anyflash::problem
