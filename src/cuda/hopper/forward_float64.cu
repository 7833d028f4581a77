#include "cuda/hopper/forward_double.cuh"

namespace anyflash::cuda {
namespace {

template <class Block>
__global__ void __launch_bounds__(Block::kThreads, 1)
    double_forward_kernel(const __grid_constant__ DoubleForwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run();
#else
  __trap();  // the host asks no other GPU for it
#endif
}

template <class Block>
DoubleForwardKernel kernel_of() {
  static_assert(sizeof(typename Block::Shared) <= 227 << 10, "more shared memory than a block of threads can have");
  return {reinterpret_cast<const void*>(&double_forward_kernel<Block>), Block::kThreads,
          static_cast<int>(sizeof(typename Block::Shared))};
}

}  // namespace

DoubleForwardKernel double_forward_kernel(int depth) {
  return depth == 64 ? kernel_of<DoubleForwardBlock<double, 64>>() : kernel_of<DoubleForwardBlock<double, 128>>();
}

}  // namespace anyflash::cuda
