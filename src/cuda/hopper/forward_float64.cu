#include "cuda/hopper/forward_double.cuh"
#include "cuda/hopper/kernel.cuh"

namespace anyflash::cuda {
namespace {

template <class Block>
GroupForwardKernel kernel_of() {
  return {group_kernel_of<Block, DoubleForwardArgs>(), Block::kThreads, shared_bytes<Block>(), 1};
}

}  // namespace

GroupForwardKernel double_forward_kernel(int depth) {
  return depth == 64 ? kernel_of<DoubleForwardBlock<double, 64>>() : kernel_of<DoubleForwardBlock<double, 128>>();
}

}  // namespace anyflash::cuda
