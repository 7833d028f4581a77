// Joins two results over different keys, in place. As many threads as read a row 16 bytes at a time have it. Memory bounds
// the speed, if a row's place takes few instructions: its divisions are of 32 bits where that is enough.
#include <algorithm>
#include <limits>

#include "cuda/backend.h"
#include "cuda/common/device.h"
#include "cuda/common/launches.h"
#include "cuda/portable/not_finite.cuh"
#include "cuda/portable/rows.cuh"
#include "problem/join.h"

namespace anyflash::cuda {
namespace {

constexpr int threads = 256, most_blocks = 4096;

template <class E, int kCount>
struct alignas(kCount * sizeof(E) < 16 ? kCount * sizeof(E) : 16) Neighbours {
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
template <class Index>
__device__ __forceinline__ Row row_of(const JoinProblem& problem, Index i) {
  const auto heads = Index(problem.heads), queries = Index(problem.queries);
  const auto down = Index(problem.size[1]), across = Index(problem.size[2]);
  const Index head = i % heads, of_batch = i / heads, query = of_batch % queries;
  Row row{of_batch / queries, head, query, 0, 0, query};
  if (queries != across) row.x = query % across, row.y = query / across % down, row.z = query / across / down;
  return row;
}

/// lanes: threads of a row, a power of two.
template <class Into, class Part, class T, int kCount, class Index>
__global__ void __launch_bounds__(threads) join_kernel(const __grid_constant__ JoinProblem problem, int lanes) {
  const auto &into = problem.into, &part = problem.part;
  const auto rows = static_cast<Index>(problem.batch * problem.heads * problem.queries);
  const int lane = threadIdx.x % lanes, of_block = threads / lanes, of_warp = 32 / lanes;
  // All threads of a warp go on while its first has a row.
  const int own = threadIdx.x / lanes, first = own / of_warp * of_warp;
  for (Index at = Index(blockIdx.x) * of_block; at + first < rows; at += Index(gridDim.x) * of_block) {
    const bool is_row = at + own < rows;
    const Row row = row_of<Index>(problem, is_row ? at + own : 0);
    T &sum = row.in<T>(into.row_sum), &largest = row.in<T>(into.row_max);
    const T own_max = largest, own_sum = sum, other = row.in<T>(part.row_max), more = row.in<T>(part.row_sum);
    const bool joins = is_row && more != T(0);  // 0 has seen no key; NaN has, whatever the maximum beside it
    const T both = own_max > other || other != other ? own_max : other;
    const T own_share = own_sum == T(0) ? T(0) : exp(own_max - both) * own_sum, share = exp(other - both) * more;
    const T total = own_share + share, of_own = own_share / total, of_part = share / total;
    auto* const to = reinterpret_cast<Into*>(into.out.data) + row.in(into.out);
    const auto* const from = reinterpret_cast<const Part*>(part.out.data) + row.in(part.out);
    for (std::int64_t c = lane * kCount; joins && c < problem.channels; c += lanes * kCount) {
      auto& results = *reinterpret_cast<Neighbours<Into, kCount>*>(to + c * into.out.channel);
      const auto found = *reinterpret_cast<const Neighbours<Part, kCount>*>(from + c * part.out.channel);
      auto made = results;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const T x = static_cast<T>(made.x[n]), y = static_cast<T>(found.x[n]);
        // No mean of 16-bit numbers overflows T.
        constexpr bool small = sizeof(Into) == 2 && sizeof(Part) == 2;
        const auto all_finite = [&] { return !small && is_finite(x) && is_finite(y); };
        made.x[n] = rounded<Into>(finite_mean(x * of_own + y * of_part, all_finite));
      }
      results = made;
    }
    __syncwarp();  // the others have read the row's sum
    if (joins && lane == 0) {
      sum = total;
      largest = total != total && both != T(__builtin_huge_val()) ? total : both;  // NaN as in forward
    }
  }
}

/// Are `count` channels of a row neighbours, and does each row begin on a multiple of them?
bool in_vectors(const JoinProblem& problem, const PartialResult& result, std::int64_t count) {
  const auto& out = result.out;
  const auto fits = [&](std::int64_t step) { return step % count == 0; };
  return problem.channels % count == 0 && out.channel == 1 && fits(out.batch) && fits(out.head) &&
         std::all_of(out.sequence, out.sequence + 3, fits) && reinterpret_cast<std::uintptr_t>(out.data) % 16 == 0;
}

template <class Into, class Part, class T, int kCount>
void start(const JoinProblem& problem) {
  const auto rows = problem.batch * problem.heads * problem.queries;
  int lanes = 1;
  while (lanes < 32 && lanes * kCount < problem.channels) lanes *= 2;
  const auto blocks = std::min<std::int64_t>((rows * lanes + threads - 1) / threads, most_blocks);
  // The last step of a block's row may go beyond the rows.
  const bool few = rows <= std::numeric_limits<std::int32_t>::max() - most_blocks * threads;
  launch_plainly(
      few ? join_kernel<Into, Part, T, kCount, std::uint32_t> : join_kernel<Into, Part, T, kCount, std::int64_t>,
      blocks, threads, static_cast<cudaStream_t>(problem.stream), problem, lanes);
}

template <class Into, class Part, class T>
void start(const JoinProblem& problem) {
  constexpr int neighbours = 16 / sizeof(Part);
  const bool vectors = in_vectors(problem, problem.into, neighbours) && in_vectors(problem, problem.part, neighbours);
  vectors ? start<Into, Part, T, neighbours>(problem) : start<Into, Part, T, 1>(problem);
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
