// Test of device functions: joining two parts of an online softmax.
//
// Join must not care how a row was cut. So a row is cut in all ways into two parts, and the joined pair is compared with
// the row's own maximum and sum in double. Parts without a visible key (m = -infinity) must change nothing, and two of
// them must give one: the place where a NaN (-infinity - -infinity) usually hides.
#include "device.h"

namespace {

struct State {
  float m = -INFINITY, l = 0;
};

__host__ __device__ State join(State a, State b) {
  const float m = fmaxf(a.m, b.m);
  if (m == -INFINITY) return {};
  return {m, a.l * expf(a.m - m) + b.l * expf(b.m - m)};
}

__global__ void join_all(const State* a, const State* b, State* to, int count) {
  if (const int n = threadIdx.x; n < count) to[n] = join(a[n], b[n]);
}

State state_of(const std::vector<float>& x, int begin, int end) {
  State state;
  for (int n = begin; n < end; ++n) state = join(state, {x[n], 1});
  return state;
}

}  // namespace

extern "C" const char* test() {
  const std::vector<float> x = {3, -100, 88, 90, -INFINITY, 0.5f, 90, -3, 120, 7, -INFINITY};
  const int count = int(x.size()) + 1;
  std::vector<State> a, b;
  for (int cut = 0; cut < count; ++cut) a.push_back(state_of(x, 0, cut)), b.push_back(state_of(x, cut, count - 1));
  a.push_back({}), b.push_back({});  // neither sees a key
  const DeviceArray<State> left(a), right(b), joined(a.size());
  launch(join_all, 1, 32, 0, left.data, right.data, joined.data, count + 1);
  const auto got = joined.get(a.size());
  double sum = 0;
  for (float one : x) sum += std::exp(double(one) - 120);
  for (int cut = 0; cut < count; ++cut)
    if (got[cut].m != 120 || !(std::abs(got[cut].l - sum) < 1e-6)) return "join: depends on where a row is cut";
  if (got[count].m != -INFINITY || got[count].l != 0) return "join: two empty parts are not an empty one";
  return nullptr;
}
