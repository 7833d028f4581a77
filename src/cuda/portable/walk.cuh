// Shared by the tile kernels: the mask of a head, its program, and steps along the runs of a block.
#pragma once

#include "cuda/portable/args.h"

namespace anyflash::cuda {

/// A compile-time condition.
template <bool kHolds>
struct Known {
  __device__ __forceinline__ constexpr operator bool() const { return kHolds; }
};

/// The mask of head h of batch entry b.
template <class Args>
__device__ __forceinline__ const DeviceGroup& group_of(const Args& args, std::int32_t b, std::int32_t h) {
  return args.groups[(args.batch_groups > 1 ? b : 0) * args.head_groups + (args.head_groups > 1 ? h : 0)];
}

/// Called by all threads of a thread block.
template <int kThreads>
__device__ __forceinline__ void load_program(const DeviceGroup& group, rules::Program& program) {
  const auto* const from = reinterpret_cast<const std::uint64_t*>(group.program);
  auto* const to = reinterpret_cast<std::uint64_t*>(&program);
  for (int i = threadIdx.x; i < int(sizeof(program) / 8); i += kThreads) to[i] = from[i];
}

/// Steps of kEntries entries of the other side. Shared: has the block's `runs` and their number, `run_count`.
template <int kEntries>
struct Walk {
  std::int32_t run, block, left, part, words;
  rules::TileClass kind;

  template <class Shared>
  __device__ __forceinline__ explicit Walk(const Shared& shared) : run(0), part(0) {
    open(shared);
  }
  __device__ __forceinline__ bool more() const { return left > 0; }
  __device__ __forceinline__ int first() const { return part * kEntries; }  ///< first entry in the block
  template <class Shared>
  __device__ __forceinline__ void step(const Shared& shared) {
    if constexpr (kEntries < 64) {
      if (++part < 64 / kEntries) return;
      part = 0;
    }
    ++block;
    if (--left == 0) ++run, open(shared);
  }

 private:
  template <class Shared>
  __device__ __forceinline__ void open(const Shared& shared) {
    left = 0;
    if (run == shared.run_count) return;
    const DeviceRun next = shared.runs[run];
    block = next.first, left = next.count, kind = next.kind, words = next.words;
  }
};

}  // namespace anyflash::cuda
