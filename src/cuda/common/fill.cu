// Results without arithmetic: fills a strided tensor with one number.
#include <algorithm>

#include "cuda/backend.h"
#include "cuda/common/device.h"
#include "cuda/common/launches.h"

namespace anyflash::cuda {
namespace {

struct FillArgs {
  char* data;
  int rank;
  std::int64_t elements, shape[TensorView::max_rank], strides[TensorView::max_rank];
};

template <class Bits>
__global__ void fill_kernel(const __grid_constant__ FillArgs args, Bits value) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < args.elements;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    std::int64_t at = 0, rest = i;
    for (int axis = args.rank - 1; axis >= 0; --axis) {
      at += rest % args.shape[axis] * args.strides[axis];
      rest /= args.shape[axis];
    }
    reinterpret_cast<Bits*>(args.data)[at] = value;
  }
}

}  // namespace

void fill(const Problem& problem, const TensorView& view, double value) {
  const DeviceScope scope(problem.device.index);
  const auto stream = static_cast<cudaStream_t>(problem.stream);
  FillArgs args{static_cast<char*>(view.data), view.rank, view.elements(), {}, {}};
  for (int i = 0; i < view.rank; ++i) args.shape[i] = view.shape[i], args.strides[i] = view.strides[i];
  constexpr int threads = 256;
  const auto blocks = std::min<std::int64_t>((args.elements + threads - 1) / threads, 4096);
  if (view.type == ElementType::float64) {
    launch_plainly(fill_kernel<double>, blocks, threads, stream, args, value);
  } else if (view.type == ElementType::float32) {
    launch_plainly(fill_kernel<float>, blocks, threads, stream, args, static_cast<float>(value));
  } else {
    launch_plainly(fill_kernel<std::uint16_t>, blocks, threads, stream, args, std::uint16_t{0});
  }
}

}  // namespace anyflash::cuda
