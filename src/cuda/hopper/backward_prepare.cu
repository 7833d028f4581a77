// What Hopper's backward kernel copies as it is: the numbers of query rows.
#include "cuda/hopper/backward_args.h"
#include "cuda/hopper/backward_kernels.h"

namespace anyflash::cuda {
namespace {

/// One block of 64 threads for each query block of each head.
__global__ void __launch_bounds__(64) prepare_rows(const __grid_constant__ GroupBackwardArgs args) {
  const auto at = blockIdx.x * std::int64_t{64} + threadIdx.x;
  const bool live = args.terms.live[blockIdx.x] >> threadIdx.x & 1;
  const auto of = [&](const void* numbers) { return static_cast<const float*>(numbers)[at]; };
  args.lse[at] = live ? of(args.terms.lse) : __int_as_float(0x7f800000);
  args.delta[at] = live ? of(args.terms.delta) * args.product_size : 0.0f;
  args.dlse[at] = live ? of(args.terms.dlse) * args.product_size : 0.0f;
}

}  // namespace

const void* prepare_rows_kernel() { return reinterpret_cast<const void*>(&prepare_rows); }

}  // namespace anyflash::cuda
