#include "cuda/hopper/backward_double.cuh"
#include "cuda/hopper/backward_double_wide.cuh"
#include "cuda/hopper/backward_kernels.h"
#include "cuda/hopper/kernel.cuh"

namespace anyflash::cuda {
namespace {

template <class Block, int depth>
GroupBackwardKernels kernels_of() {
  return {reinterpret_cast<const void*>(&prepare_double_rows<depth>),
          group_kernel_of<Block, DoubleBackwardArgs>(),
          reinterpret_cast<const void*>(&store_double_query_gradients<depth>),
          nullptr,
          Block::kThreads,
          shared_bytes<Block>(),
          Block::kKeyBlocks,
          4 * depth};
}

}  // namespace

GroupBackwardKernels group_backward_kernels_float64(int depth) {
  return depth == 64 ? kernels_of<DoubleBackwardBlock<double>, 64>()
                     : kernels_of<WideDoubleBackwardBlock<double>, 128>();
}

}  // namespace anyflash::cuda
