#include "cuda/hopper/backward_double.cuh"
#include "cuda/hopper/backward_double_wide.cuh"

namespace anyflash::cuda {
namespace {

template <class Block>
__global__ void __launch_bounds__(Block::kThreads, 1)
    double_backward_kernel(const __grid_constant__ DoubleBackwardArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run();
#else
  __trap();  // the host asks no other GPU for it
#endif
}

template <class Block, int depth>
DoubleBackwardKernels kernels_of() {
  static_assert(sizeof(typename Block::Shared) <= 227 << 10, "more shared memory than a block of threads can have");
  return {reinterpret_cast<const void*>(&prepare_double_rows<depth>),
          reinterpret_cast<const void*>(&double_backward_kernel<Block>),
          reinterpret_cast<const void*>(&store_double_query_gradients<depth>),
          Block::kThreads,
          static_cast<int>(sizeof(typename Block::Shared)),
          4 * depth,
          Block::kKeyBlocks};
}

}  // namespace

DoubleBackwardKernels double_backward_kernels(int depth) {
  return depth == 64 ? kernels_of<DoubleBackwardBlock<double>, 64>()
                     : kernels_of<WideDoubleBackwardBlock<double>, 128>();
}

}  // namespace anyflash::cuda
