// Joins two results over different keys, in place. A warp has a row at a time; memory bounds the speed.
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/common/device.h"
#include "cuda/common/launches.h"
#include "cuda/portable/rows.cuh"
#include "problem/join.h"

namespace anyflash::cuda {
namespace {

constexpr int threads = 256, most_blocks = 4096;

template <class E, int kCount>
struct alignas(kCount * sizeof(E)) Neighbours {
  E x[kCount];
};

/// A row's place in a tensor of numbers.
struct Row {
  std::int64_t b, h, query, z, y, x;

  __device__ std::int64_t in(const Operand& out) const {
    return b * out.batch + h * out.head + z * out.sequence[0] + y * out.sequence[1] + x * out.sequence[2];
  }
  template <class T>
  __device__ T& in(const RowStatistic& rows) const {
    return reinterpret_cast<T*>(rows.data)[b * rows.batch + h * rows.head + query * rows.query];
  }
};

/// Rows of neighbouring heads follow each other: so they lie in most tensors that are split.
__device__ __forceinline__ Row row_of(const JoinProblem& problem, std::int64_t i) {
  Row row{};
  row.h = i % problem.heads, i /= problem.heads;
  row.query = i % problem.queries, row.b = i / problem.queries;
  row.x = row.query % problem.size[2];
  row.y = row.query / problem.size[2] % problem.size[1], row.z = row.query / problem.size[2] / problem.size[1];
  return row;
}

template <class Into, class Part, class T, int kCount>
__global__ void __launch_bounds__(threads) join_kernel(const __grid_constant__ JoinProblem problem) {
  const auto &into = problem.into, &part = problem.part;
  const std::int64_t rows = problem.batch * problem.heads * problem.queries;
  const int lane = threadIdx.x % 32;
  for (auto i = (blockIdx.x * std::int64_t{threads} + threadIdx.x) / 32; i < rows; i += gridDim.x * (threads / 32)) {
    const Row row = row_of(problem, i);
    T &sum = row.in<T>(into.row_sum), &largest = row.in<T>(into.row_max);
    const T own = largest, own_sum = sum, other = row.in<T>(part.row_max), more = row.in<T>(part.row_sum);
    if (more == T(0)) continue;  // it has seen no key; NaN has, whatever the maximum beside it
    const T both = own > other ? own : other;
    const T own_share = own_sum == T(0) ? T(0) : exp(own - both) * own_sum, share = exp(other - both) * more;
    const T of_own = own_share / (own_share + share), of_part = share / (own_share + share);
    __syncwarp();
    if (lane == 0) sum = own_share + share, largest = both;
    auto* const to = reinterpret_cast<Into*>(into.out.data) + row.in(into.out);
    const auto* const from = reinterpret_cast<const Part*>(part.out.data) + row.in(part.out);
    for (std::int64_t c = lane * kCount; c < problem.channels; c += 32 * kCount) {
      auto& results = *reinterpret_cast<Neighbours<Into, kCount>*>(to + c * into.out.channel);
      const auto found = *reinterpret_cast<const Neighbours<Part, kCount>*>(from + c * part.out.channel);
      auto made = results;
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        made.x[n] = rounded<Into>(static_cast<T>(made.x[n]) * of_own + static_cast<T>(found.x[n]) * of_part);
      results = made;
    }
  }
}

constexpr int kNeighbours = 4;

/// Are a row's channels neighbours, and does each row begin on a multiple of kNeighbours numbers?
bool in_vectors(const JoinProblem& problem, const PartialResult& result) {
  const auto& out = result.out;
  const auto fits = [](std::int64_t step) { return step % kNeighbours == 0; };
  return problem.channels % kNeighbours == 0 && out.channel == 1 && fits(out.batch) && fits(out.head) &&
         std::all_of(out.sequence, out.sequence + 3, fits) &&
         reinterpret_cast<std::uintptr_t>(out.data) % (kNeighbours * element_size(result.type)) == 0;
}

template <class Into, class Part, class T>
void start(const JoinProblem& problem) {
  const auto rows = problem.batch * problem.heads * problem.queries;
  const auto blocks = std::min<std::int64_t>((rows * 32 + threads - 1) / threads, most_blocks);
  const bool vectors = in_vectors(problem, problem.into) && in_vectors(problem, problem.part);
  launch_plainly(vectors ? join_kernel<Into, Part, T, kNeighbours> : join_kernel<Into, Part, T, 1>, blocks, threads,
                 static_cast<cudaStream_t>(problem.stream), problem);
}

}  // namespace

void join(const JoinProblem& problem) {
  const DeviceScope scope(problem.device.index);
  const bool widened = problem.into.type != problem.part.type;
  switch (problem.part.type) {
    case ElementType::float16:
      return widened ? start<float, __half, float>(problem) : start<__half, __half, float>(problem);
    case ElementType::bfloat16:
      return widened ? start<float, __nv_bfloat16, float>(problem)
                     : start<__nv_bfloat16, __nv_bfloat16, float>(problem);
    case ElementType::float32: return start<float, float, float>(problem);
    default: return start<double, double, double>(problem);
  }
}

}  // namespace anyflash::cuda
