// The entry of Hopper's kernels, most with one thread block per multiprocessor.
#pragma once

#include <type_traits>

#include "cuda/common/instructions.cuh"
#include "problem/problem.h"

namespace anyflash::cuda {

template <ElementType type>
using NumberOf16 = std::conditional_t<type == ElementType::float16, __half, __nv_bfloat16>;

/// Block: the kernel's thread block, with run(), its shared memory type Shared, and kThreads.
template <class Block, class Args, int kBlocks = 1>
__global__ void __launch_bounds__(Block::kThreads, kBlocks) group_kernel(const __grid_constant__ Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char memory[];
  Block(args, *reinterpret_cast<typename Block::Shared*>(memory)).run();
#else
  __trap();  // never launched: the host asks no other GPU for it
#endif
}

template <class Block, class Args, int kBlocks = 1>
const void* group_kernel_of() {
  return reinterpret_cast<const void*>(&group_kernel<Block, Args, kBlocks>);
}

/// Bytes of shared memory.
template <class Block>
constexpr int shared_bytes() {
  static_assert(sizeof(typename Block::Shared) <= 227 << 10, "more shared memory than a thread block can have");
  return static_cast<int>(sizeof(typename Block::Shared));
}

}  // namespace anyflash::cuda
