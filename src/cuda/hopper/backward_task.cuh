// Shared by Hopper's backward kernels for float32 and float64. A thread block has one task: a few neighbouring key
// blocks of a head. Two consumer warpgroups come first, then one producer warpgroup.
#pragma once

#include "cuda/portable/backward_args.h"
#include "cuda/tile/runs.cuh"

namespace anyflash::cuda {

template <class Args, class BlockShared, int key_blocks, int registers, int loader_registers>
class BackwardTask {
 public:
  using Shared = BlockShared;
  static constexpr int kKeyBlocks = key_blocks, kThreads = 3 * 128;

  __device__ __forceinline__ BackwardTask(const Args& args, Shared& shared) : args_(args), shared_(shared) {
    const auto& side = args.sides[keys];
    const auto task = static_cast<std::int32_t>(blockIdx.x);
    const auto tasks = (side.blocks + kKeyBlocks - 1) / kKeyBlocks, head = task / tasks;  // tasks: of a head
    first_block_ = task % tasks * kKeyBlocks;  // under causal rules the first blocks take longest
    b_ = head / side.heads, key_head_ = head % side.heads;
  }

 protected:
  static constexpr int kRegisters = registers, kLoaderRegisters = loader_registers;

  /// Block: its load() is run by one warp.
  template <class Block>
  __device__ __forceinline__ void load_and_compute(Block& block) {
    if (threadIdx.x == 0) shared_.begin();
    __syncthreads();
    if (threadIdx.x >= 256) {
      setmaxnreg_dec<kLoaderRegisters>();
      if (threadIdx.x < 256 + 32) block.load();
    } else {
      setmaxnreg_inc<kRegisters>();
      block.compute();
    }
  }

  const Args& args_;
  Shared& shared_;
  std::int32_t b_, key_head_, first_block_;
};

}  // namespace anyflash::cuda
