#include "cuda/common/words.h"

#include "cuda/common/launches.h"
#include "cuda/portable/rows.cuh"
#include "cuda/portable/walk.cuh"
#include "rules/words.h"

namespace anyflash::cuda {
namespace {

/// One thread block for each block of each mask, one thread for each row.
__global__ void __launch_bounds__(128) words_kernel(const __grid_constant__ WordArgs args) {
  __shared__ rules::Program program;
  const auto& group = args.groups[blockIdx.x / args.blocks];
  const auto block = static_cast<std::int32_t>(blockIdx.x % args.blocks);
  const auto& list = args.of_queries ? group.keys_of_query_block : group.queries_of_key_block;
  const auto& own = args.of_queries ? args.query_grid : args.key_grid;
  const auto& other = args.of_queries ? args.key_grid : args.query_grid;
  if (args.numbered && *args.numbered > static_cast<unsigned long long>(args.most_tiles)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *args.too_many = 1;
    return;
  }
  rules::Int3 entry;
  bool exists = false, loaded = false;
  for (auto i = list.start[block]; i < list.start[block + 1]; ++i) {
    const DeviceRun run = list.runs[i];
    if (run.count == 0) break;
    if (run.kind == rules::TileClass::full || run.words >= 0) continue;
    if (!loaded) {
      if (threadIdx.x < 64) load_program<64>(group, program);
      __syncthreads();
      entry = entry_of(own.box(block), static_cast<int>(threadIdx.x));
      exists = rules::inside(entry, args.of_queries ? own.size : program.k_size());
      loaded = true;
    }
    for (std::int32_t n = 0; n < run.count; ++n) {
      rules::Word word = 0;
      if (exists) {
        const auto cell = other.box(run.first + n);
        const bool inside = rules::inside(cell.origin, args.of_queries ? program.k_size() : program.q_size());
        word = !inside           ? 0
               : args.of_queries ? rules::word(program, entry, cell)
                                 : rules::word_of_queries(program, entry, cell);
      }
      args.words[(std::int64_t{~run.words} + n) * blockDim.x + threadIdx.x] = word;
    }
  }
}

}  // namespace

void ask_all_words(const WordArgs& args, std::int64_t groups, cudaStream_t stream) {
  if (groups * args.blocks == 0) return;
  const auto rows = rules::volume((args.of_queries ? args.query_grid : args.key_grid).extent);
  launch_plainly(words_kernel, groups * args.blocks, rows, stream, args);
}

}  // namespace anyflash::cuda
