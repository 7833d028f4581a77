// Shared memory and tasks of the forward kernel's thread blocks, and functions that are called rather than inlined
// because they are rarely needed.
#pragma once

#include <type_traits>

#include "cuda/portable/forward_args.h"
#include "cuda/portable/not_finite.cuh"
#include "cuda/portable/products.cuh"
#include "cuda/portable/rows.cuh"
#include "cuda/portable/scores.cuh"
#include "cuda/portable/softmax.cuh"
#include "cuda/portable/tuning.h"
#include "cuda/portable/walk.cuh"
#include "rules/coordinates.h"
#include "rules/words.h"

namespace anyflash::cuda {

using rules::Box, rules::Int3, rules::Program, rules::TileClass, rules::Word;

/// The task of a thread block: part of a query block of one head, some channels of its values.
struct Task {
  std::int32_t b, h, block, first_row, first_value;

  __device__ __forceinline__ void find(const ForwardArgs& args, std::int32_t task, int rows, int values) {
    first_value = task % args.value_parts * values;
    task /= args.value_parts;
    const auto parts = args.query_blocks * args.block_parts, head = task / parts;
    task = parts - 1 - task % parts;  // under causal rules later blocks take longest, so they go first
    b = head / args.heads, h = head % args.heads;
    block = task / args.block_parts, first_row = task % args.block_parts * rows;
  }
  /// The coordinate of a row of the part; false if it is beyond the sequence. Boxes are recomputed where they are
  /// needed, which is rare, so that they hold no registers.
  __device__ __forceinline__ bool query(const ForwardArgs& args, int row, Int3& c) const {
    c = entry_of(box_of(args.query_grid, args.query_rows, block), first_row + row);
    return rules::inside(c, args.query_grid.size);
  }
};

/// Must the task be computed, or has another kernel computed it?
static __device__ __noinline__ bool is_wanted(const ForwardArgs& args, std::int32_t task) {
  if (!args.only_blocks || *args.only_if != kBlocksAgain) return true;
  Task found;
  found.find(args, task, 0, 0);
  const auto block = (std::int64_t{found.b} * args.heads + found.h) * args.query_blocks + found.block;
  for (std::int32_t i = 0; i < args.notes; ++i)
    if (args.only_blocks[block * args.notes + i]) return true;
  return false;
}

/// Each thread block calls it at its end. The last one leaves zeros to the next call: of what asks for this kernel, and of
/// the counter behind it, which counts thread blocks.
static __device__ __noinline__ void clear_counters(std::int32_t* only_if) {
  __syncthreads();  // all threads have read it
  if (threadIdx.x > 0) return;
  __threadfence();
  if (atomicAdd(only_if + 1, 1) + 1 == static_cast<std::int32_t>(gridDim.x)) only_if[0] = only_if[1] = 0;
}

/// The shared memory of a thread block. Coordinates and biases exist only if scores need more than a scale.
template <class E, class T, class Sizes, bool kGeneral>
struct ForwardShared {
  using Products = typename ProductsOf<E, Sizes::kTf32>::type;
  using QueryTile = typename Products::template KeyTile<Sizes::kRows, Sizes::kDepth>;
  using KeyTile = typename Products::template KeyTile<Sizes::kKeys, Sizes::kDepth>;
  using ValueTile = typename Products::template ValueTile<Sizes::kKeys, Sizes::kValues>;
  using ResultTile = PaddedTile<E, Sizes::kRows, Sizes::kValues, 16>;  // overlays q and k once they are no longer read
  static_assert(ResultTile::kSize <= QueryTile::kSize + KeyTile::kSize);
  struct Extras {
    std::int32_t x[3][Sizes::kRows], y[3][Sizes::kKeys];
    std::int64_t bias_row[Sizes::kRows], bias_key[Sizes::kKeys];  // `nowhere` if there is none
  };
  struct Nothing {};

  alignas(Products::alignment) E q[QueryTile::kSize];
  alignas(Products::alignment) E k[KeyTile::kSize];
  alignas(Products::alignment) E v[ValueTile::kSize];
  Word words[Sizes::kRows];
  T weights[Sizes::kRows];                        // factors of P for a pass where it sums to a half
  unsigned long long k_not_finite, v_not_finite;  // rows of the tiles with a NaN or an infinity
  Program program;
  // What the main loop rarely needs is kept here, not in registers.
  Task task;
  const E *keys, *values;  // of this head, in global memory; values from the first wanted channel on
  const DeviceRun* runs;   // of this query block
  std::int32_t run_count;
  const Word* word_table;  // from this part's first row on
  std::conditional_t<kGeneral, Extras, Nothing> extras;
};

/// The keys of a block from entry `first` on: the offset of row r, in elements from (b, h); false if there is none.
struct KeyRows {
  const ForwardArgs& args;
  std::int32_t b;
  std::int32_t first;
  rules::Int3 size;
  rules::Box box;

  __device__ __forceinline__ bool find(const Rows& rows, int r, std::int64_t& at) const {
    r += first;
    const auto c = entry_of(box, r);
    const bool exists = rules::inside(c, size);
    if (!args.paged) {
      at = c[0] * rows.sequence[0] + c[1] * rows.sequence[1] + c[2] * rows.sequence[2];
    } else {
      const auto page = c[2] / args.pages.page_size, row = c[2] % args.pages.page_size;
      at = exists ? args.pages.at(b, page) * rows.batch + row * rows.sequence[2] : 0;
    }
    return exists;
  }
};

/// The part's rows in a tensor.
struct PartRows {
  const ForwardArgs& args;
  Task task;
  __device__ __forceinline__ bool find(const Rows& rows, int r, std::int64_t& at) const {
    Int3 c;
    const bool exists = task.query(args, r, c);
    at = c[0] * rows.sequence[0] + c[1] * rows.sequence[1] + c[2] * rows.sequence[2];
    return exists;
  }
};

// What follows is called, not inlined: it is rare, and would cost the main loop registers and instruction cache.

/// The mask word of a row for a block of keys.
static __device__ __noinline__ Word word_of(const ForwardArgs& args, const Program& program, Task task, int row,
                                            std::int32_t key_block) {
  Int3 c;
  return task.query(args, row, c) ? rules::word(program, c, box_of(args.key_grid, args.key_rows, key_block)) : 0;
}

/// The mask words of a tile's rows.
template <class Shared, int kRows>
__device__ __forceinline__ void find_words(const ForwardArgs& args, Shared& shared, Task task, std::int32_t key_block) {
  const int row = static_cast<int>(threadIdx.x);
  if (row < kRows) shared.words[row] = word_of(args, shared.program, task, row, key_block);
}

/// Coordinates of the rows, and where their biases are.
template <class Shared, int kRows>
__device__ __noinline__ void find_query_extras(const ForwardArgs& args, Shared& shared, Task task) {
  for (int row = threadIdx.x; row < kRows; row += blockDim.x) {
    Int3 c;
    const bool exists = task.query(args, row, c);
    shared.extras.bias_row[row] = exists ? rules::flat_index(c, args.query_grid.size) * args.bias.query : nowhere;
    const auto x = exists ? rules::query_coordinate(shared.program, c) : rules::Coordinate{};
    for (int n = 0; n < 3; ++n) shared.extras.x[n][row] = static_cast<std::int32_t>(x[n]);
  }
}

/// The same for a tile's keys.
template <class Shared, int kKeys>
__device__ __noinline__ void find_key_extras(const ForwardArgs& args, Shared& shared, std::int32_t block, int first) {
  const int key = static_cast<int>(threadIdx.x);
  if (key >= kKeys) return;
  const Int3 c = entry_of(box_of(args.key_grid, args.key_rows, block), first + key);
  const bool exists = rules::inside(c, shared.program.k_size());
  shared.extras.bias_key[key] = exists ? rules::flat_index(c, args.key_grid.size) * args.bias.key : nowhere;
  const auto y = exists ? rules::key_coordinate(shared.program, c) : rules::Coordinate{};
  for (int n = 0; n < 3; ++n) shared.extras.y[n][key] = static_cast<std::int32_t>(y[n]);
}

/// Does the rule let a row see any key? Only needed where no score is above -inf.
template <class Shared>
__device__ __noinline__ bool sees_a_key(const ForwardArgs& args, const Shared& shared, Task task, int row) {
  Int3 c;
  if (!task.query(args, row, c)) return false;
  for (std::int32_t r = 0; r < shared.run_count; ++r) {
    const DeviceRun run = shared.runs[r];
    if (run.kind == TileClass::full) return true;
    for (std::int32_t i = 0; i < run.count; ++i)
      if (word_of(args, shared.program, task, row, run.first + i)) return true;
  }
  return false;
}

/// The place of a row's statistics: its number in the sequence, -1 if it does not exist.
static __device__ __noinline__ std::int64_t place_of(const ForwardArgs& args, Task task, int row) {
  Int3 c;
  return task.query(args, row, c) ? rules::flat_index(c, args.query_grid.size) : -1;
}

}  // namespace anyflash::cuda
