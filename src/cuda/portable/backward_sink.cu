// The last step of the sink's gradient: a head's sum over all query blocks, always in the same order.
#include "cuda/common/launches.h"
#include "cuda/portable/backward_args.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/rows.cuh"

namespace anyflash::cuda {
namespace {

constexpr int threads = 256;

__global__ void sum_kernel(const __grid_constant__ BackwardArgs args) {
  __shared__ double sums[threads];
  const auto& side = args.sides[0];
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < std::int64_t{args.batch} * side.blocks; i += threads)
    sum += args.terms.sink[(i / side.blocks * side.heads + blockIdx.x) * side.blocks + i % side.blocks];
  sums[threadIdx.x] = sum;
  for (int half = threads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) write_number(args.dsink, blockIdx.x * args.dsink.head, sums[0]);
}

}  // namespace

void load_sum_sinks(int device) { allow_shared_memory(reinterpret_cast<const void*>(sum_kernel), 0, device); }

void sum_sinks(const BackwardArgs& args, cudaStream_t stream) {
  launch_plainly(sum_kernel, args.sides[0].heads, threads, stream, args);
}

}  // namespace anyflash::cuda
