// What Hopper's backward kernel copies as it is: the numbers of query rows, and the words of tiles that have none in
// the plan's tables. It cannot ask a program itself: its warpgroups share a multiprocessor's registers by role, and
// calls do not fit in. A mask is asked once for all heads.
#include "cuda/hopper/backward_args.h"
#include "cuda/portable/backward_shared.cuh"

namespace anyflash::cuda {
namespace {

/// One block of 64 threads for each key block of each mask.
__global__ void __launch_bounds__(64) ask_all_words(const __grid_constant__ GroupBackwardArgs args) {
  __shared__ Program program;
  const auto& side = args.sides[keys];
  const auto& group = args.groups[blockIdx.x / side.blocks];
  const auto block = static_cast<std::int32_t>(blockIdx.x % side.blocks);
  const auto& list = group.queries_of_key_block;
  Int3 key;
  bool exists = false;
  bool loaded = false;
  for (auto i = list.start[block]; i < list.start[block + 1]; ++i) {
    const DeviceRun run = list.runs[i];
    if (run.kind == TileClass::full || run.words >= 0) continue;
    if (!loaded) {
      const auto* const from = reinterpret_cast<const std::uint64_t*>(group.program);
      for (int n = threadIdx.x; n < int(sizeof(Program) / 8); n += 64)
        reinterpret_cast<std::uint64_t*>(&program)[n] = from[n];
      __syncthreads();
      key = entry_of(box_of(side.grid, side.plain, block), threadIdx.x);
      exists = rules::inside(key, program.k_size());
      loaded = true;
    }
    for (std::int32_t n = 0; n < run.count; ++n) {
      const auto cell = box_of(args.sides[queries].grid, args.sides[queries].plain, run.first + n);
      args.words[(std::int64_t{~run.words} + n) * 64 + threadIdx.x] =
          exists ? rules::word_of_queries(program, key, cell) : 0;
    }
  }
}

/// One block of 64 threads for each query block of each head.
__global__ void __launch_bounds__(64) prepare_rows(const __grid_constant__ GroupBackwardArgs args) {
  const auto at = blockIdx.x * std::int64_t{64} + threadIdx.x;
  const bool live = args.terms.live[blockIdx.x] >> threadIdx.x & 1;
  const auto of = [&](const void* numbers) { return static_cast<const float*>(numbers)[at]; };
  args.lse[at] = live ? of(args.terms.lse) : __int_as_float(0x7f800000);
  args.delta[at] = live ? of(args.terms.delta) - of(args.terms.dlse) : 0.0f;
}

}  // namespace

const void* prepare_rows_kernel() { return reinterpret_cast<const void*>(&prepare_rows); }
const void* ask_all_words_kernel() { return reinterpret_cast<const void*>(&ask_all_words); }

}  // namespace anyflash::cuda
