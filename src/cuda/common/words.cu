#include "cuda/common/words.h"

#include <algorithm>

#include "cuda/common/launches.h"
#include "cuda/portable/rows.cuh"
#include "cuda/portable/walk.cuh"
#include "rules/words.h"

namespace anyflash::cuda {
namespace {

/// Which entries of a cell does an entry of the other side see, or is it seen by?
__device__ rules::Word word_of(const WordArgs& args, const rules::Program& program, const rules::Int3& entry,
                               const rules::Box& cell) {
  if (!rules::inside(cell.origin, args.of_queries ? program.k_size() : program.q_size())) return 0;
  return args.of_queries ? rules::word(program, entry, cell) : rules::word_of_queries(program, entry, cell);
}
/// The same of a ragged mask. entries: of the cell's side.
__device__ rules::Word word_of(const RaggedMask& mask, bool of_queries, std::int64_t entry, const rules::Box& cell,
                               std::int32_t entries) {
  const rules::Line line{cell.origin[2], 1};
  const auto document = (of_queries ? mask.q : mask.k).segment_of[entry];
  const auto word = rules::document_bits(of_queries ? mask.k : mask.q, document, line.base, 1) &
                    rules::low_bits(min(cell.extent[2], entries - cell.origin[2]));
  if (mask.rule != RaggedMask::Rule::causal) return word;
  return word & (of_queries ? rules::interval_bits(line, -rules::unlimited, entry)
                            : rules::interval_bits(line, entry, rules::unlimited));
}

/// One thread for each row of a block, whose tiles are dealt among `shares` thread blocks: a block where two long
/// documents meet has hundreds.
__global__ void __launch_bounds__(128) words_kernel(const __grid_constant__ WordArgs args, std::int32_t shares) {
  __shared__ rules::Program program;
  const auto task = static_cast<std::int32_t>(blockIdx.x) / shares,
             share = static_cast<std::int32_t>(blockIdx.x) % shares;
  const auto& group = args.groups[task / args.blocks];
  const auto block = task % args.blocks;
  const auto& list = args.of_queries ? group.keys_of_query_block : group.queries_of_key_block;
  const auto& own = args.of_queries ? args.query_grid : args.key_grid;
  const auto& other = args.of_queries ? args.key_grid : args.query_grid;
  if (args.numbered && *args.numbered > static_cast<unsigned long long>(args.most_tiles)) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *args.too_many = 1;
    return;
  }
  const bool ragged = args.ragged.q.segment_of && !(args.ragged.apart && *args.ragged.apart);
  rules::Int3 entry = own.box(block).origin;
  entry[2] += static_cast<int>(threadIdx.x);
  bool exists = ragged && entry[2] < own.size[2], loaded = ragged;
  std::int32_t next = share;  // of the tiles from here on, the first in this share
  for (auto i = list.start[block]; i < list.start[block + 1]; ++i) {
    const DeviceRun run = list.runs[i];
    if (run.count == 0) break;
    if (run.kind == rules::TileClass::full || run.words >= 0) continue;
    for (; next < run.count; next += shares) {
      if (!loaded) {
        if (threadIdx.x < 64) load_program<64>(group, program);
        __syncthreads();
        entry = entry_of(own.box(block), static_cast<int>(threadIdx.x));
        exists = rules::inside(entry, args.of_queries ? own.size : program.k_size());
        loaded = true;
      }
      rules::Word word = 0;
      if (exists) {
        const auto cell = other.box(run.first + next);
        word = ragged ? word_of(args.ragged, args.of_queries, entry[2], cell, other.size[2])
                      : word_of(args, program, entry, cell);
      }
      args.words[(std::int64_t{~run.words} + next) * blockDim.x + threadIdx.x] = word;
    }
    next -= run.count;
  }
}

}  // namespace

void ask_all_words(const WordArgs& args, std::int64_t groups, cudaStream_t stream) {
  if (groups * args.blocks == 0) return;
  const auto rows = rules::volume((args.of_queries ? args.query_grid : args.key_grid).extent);
  // A ragged mask's words take so little time that each thread block counts.
  const auto shares = args.ragged.q.segment_of && !args.ragged.apart
                          ? 4
                          : std::clamp<std::int64_t>(8192 / (groups * args.blocks), 4, 32);
  launch_plainly(words_kernel, groups * args.blocks * shares, rows, stream, args, static_cast<std::int32_t>(shares));
}

}  // namespace anyflash::cuda
