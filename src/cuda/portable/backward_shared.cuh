// The shared memory of the backward kernel's thread blocks, their tasks, and functions that are called rather than
// inlined because they are rarely needed.
#pragma once

#include "cuda/portable/backward_args.h"
#include "cuda/portable/backward_tuning.h"
#include "cuda/portable/not_finite.cuh"
#include "cuda/portable/products.cuh"
#include "cuda/portable/rows.cuh"
#include "cuda/portable/scores.cuh"
#include "cuda/portable/walk.cuh"
#include "rules/coordinates.h"
#include "rules/words.h"

namespace anyflash::cuda {

using rules::Box, rules::Int3, rules::Program, rules::TileClass, rules::Word;

enum Side : std::int32_t { queries, keys };
enum class Role : std::int32_t { keys, queries, bias };  ///< dk and dv, dq, dbias

/// The task of a thread block: the gradients of some rows of its own side, or a tile of the bias. Its entries are the
/// (batch, head) pairs over which it sums. For a bias with one query they also cover all parts of query blocks.
struct GradientTask {
  Role role;
  Side own;
  std::int32_t result;                  ///< large heads: 0 is the first gradient, n the second's channel group n
  std::int32_t b, h, block, first_row;  ///< of the current entry; h: a query head
  std::int32_t other_block;             ///< bias: the only block of the other side that counts, -1: all
  std::int64_t entries;
  std::int32_t first_b, first_h;
  std::int64_t first_part;

  /// rows: of a part of a block; key_results: thread blocks that share the gradients of keys.
  __device__ __forceinline__ void find(const BackwardArgs& args, std::int64_t task, int rows, int key_results) {
    result = 0, other_block = -1, entries = 1;
    if (task < args.key_tasks) {
      role = Role::keys, own = keys;
      result = static_cast<std::int32_t>(task % key_results);
      task /= key_results;
      const std::int64_t parts = args.sides[keys].blocks * std::int64_t{64 / rows}, head = task / parts;
      first_part = task % parts;
      first_b = static_cast<std::int32_t>(head / args.sides[keys].heads);
      first_h = static_cast<std::int32_t>(head % args.sides[keys].heads) * args.group_heads;
      entries = args.group_heads;
    } else if (task -= args.key_tasks; task < args.query_tasks) {
      role = Role::queries, own = queries;
      const std::int64_t parts = args.sides[queries].blocks * std::int64_t{64 / rows}, head = task / parts;
      first_part = parts - 1 - task % parts;  // under causal rules later blocks take longest, so they go first
      first_b = static_cast<std::int32_t>(head / args.sides[queries].heads);
      first_h = static_cast<std::int32_t>(head % args.sides[queries].heads);
    } else {
      find_bias(args, rows, task - args.query_tasks);
    }
    enter(args, rows, 0);
  }

  __device__ __forceinline__ void enter(const BackwardArgs& args, int rows, std::int64_t entry) {
    auto part = first_part;
    b = first_b, h = first_h;
    if (role == Role::bias) {
      const std::int64_t parts = whole_own(args) ? args.sides[own].blocks * std::int64_t{64 / rows} : 1;
      const std::int32_t heads = args.bias_size[1] == 1 ? args.sides[queries].heads : 1;
      part += entry % parts;
      entry /= parts;
      b += static_cast<std::int32_t>(entry / heads);
      h += static_cast<std::int32_t>(entry % heads);
    } else {
      h += static_cast<std::int32_t>(entry);
    }
    block = static_cast<std::int32_t>(part * rows / 64);
    first_row = static_cast<std::int32_t>(part * rows % 64);
  }

  /// Is the bias one number for all rows of the own side, or of the other?
  __device__ __forceinline__ bool whole_own(const BackwardArgs& args) const { return args.bias_size[2 + own] == 1; }
  __device__ __forceinline__ bool whole_other(const BackwardArgs& args) const { return args.bias_size[3 - own] == 1; }

 private:
  __device__ __forceinline__ void find_bias(const BackwardArgs& args, int rows, std::int64_t task) {
    role = Role::bias;
    own = args.bias_size[2] == 1 && args.bias_size[3] != 1 ? keys : queries;
    const std::int64_t own_parts = args.sides[own].blocks * std::int64_t{64 / rows};
    const std::int64_t parts = whole_own(args) ? 1 : own_parts;
    if (!whole_other(args)) {
      other_block = static_cast<std::int32_t>(task % args.sides[1 - own].blocks);
      task /= args.sides[1 - own].blocks;
    }
    first_part = task % parts;
    task /= parts;
    first_h = static_cast<std::int32_t>(task % args.bias_size[1]);
    first_b = static_cast<std::int32_t>(task / args.bias_size[1]);
    entries = whole_own(args) ? own_parts : 1;
    if (args.bias_size[0] == 1) entries *= args.batch;
    if (args.bias_size[1] == 1) entries *= args.sides[queries].heads;
  }
};

/// The shared memory of a thread block.
template <class E, class Sizes>
struct GradientShared {
  using Products = typename ProductsOf<E, Sizes::kTf32>::type;
  using T = typename Products::Number;
  using OwnTile = typename Products::template KeyTile<Sizes::kRows, Sizes::kDepth>;
  using OtherTile = typename Products::template KeyTile<Sizes::kColumns, Sizes::kDepth>;
  using ResultTile = PaddedTile<E, Sizes::kRows, Sizes::kDepth, 16>;  // overlays `own` once that is no longer read
  static constexpr int kHeld = Sizes::kResident ? 2 : 1;
  static_assert(ResultTile::kSize <= OwnTile::kSize);
  static_assert(sizeof(T) * Sizes::kRows * 64 <= sizeof(E) * kHeld * OwnTile::kSize, "for a tile of the bias");

  /// What is loaded for a step.
  struct Stage {
    alignas(Products::alignment) E tiles[kHeld][OtherTile::kSize];
    alignas(16) T terms[4][64];  // lse, delta, dlse and rest of the step's query block
    Word live;                   // its rows that have a gradient
    Word words[Sizes::kRows];    // mask words of a partial tile
    // Where scores need more than a scale: coordinates of the rows, and where their biases are (`nowhere` for rows that
    // do not exist).
    std::int32_t at[3][Sizes::kColumns];
    std::int64_t bias[Sizes::kColumns];
  };

  alignas(Products::alignment) E own[kHeld][OwnTile::kSize];
  Stage stages[Sizes::kStages];
  unsigned long long not_finite[kHeld];  // rows of the other side's tiles with a NaN or an infinity
  Program program;
  GradientTask task;
  const E *own_data[2], *other_data[2];  // of the heads, in global memory
  DeviceRun only;                        // the run of a task that visits one block only
  const DeviceRun* runs;
  std::int32_t run_count;
  const Word* word_table;                // from this part's first row on
  std::int32_t own_at[3][Sizes::kRows];  // like those of a stage
  std::int64_t own_bias[Sizes::kRows];
};

/// Rows of a block from entry `first` on.
struct BlockRows {
  Box box;
  Int3 size;
  std::int32_t first;

  __device__ __forceinline__ bool coordinate(int r, Int3& c) const {
    c = entry_of(box, first + r);
    return rules::inside(c, size);
  }
  __device__ __forceinline__ bool find(const Rows& rows, int r, std::int64_t& at) const {
    Int3 c;
    const bool exists = coordinate(r, c);
    at = c[0] * rows.sequence[0] + c[1] * rows.sequence[1] + c[2] * rows.sequence[2];
    return exists;
  }
};

template <class E>
__device__ __forceinline__ E* head_data(const Rows& rows, std::int64_t b, std::int64_t h) {
  return reinterpret_cast<E*>(rows.data) + b * rows.batch + h * rows.head;
}

// What follows is called, not inlined: it is rare, and would cost the main loop registers and instruction cache.

/// The mask word of a row of a partial tile, evaluated by the mask program.
static __device__ __noinline__ Word ask_word(const BackwardArgs& args, const Program& program, const GradientTask& task,
                                             std::int32_t other_block, int row) {
  const auto own = task.own;
  const auto& side = args.sides[own];
  const auto& other = args.sides[1 - own];
  const auto size = own == queries ? side.grid.size : program.k_size();
  const BlockRows rows{box_of(side.grid, side.plain, task.block), size, task.first_row};
  Int3 c;
  if (!rows.coordinate(row, c)) return 0;
  const auto cell = box_of(other.grid, other.plain, other_block);
  return own == queries ? rules::word(program, c, cell) : rules::word_of_queries(program, c, cell);
}

/// Coordinates of some rows, and where their biases are.
template <int kRows>
__device__ __noinline__ void find_extras(const BackwardArgs& args, const Program& program, Side side,
                                         std::int32_t block, std::int32_t first, std::int32_t (&at)[3][kRows],
                                         std::int64_t (&bias)[kRows]) {
  const auto& grid = args.sides[side].grid;
  const auto size = side == queries ? grid.size : program.k_size();
  const BlockRows rows{box_of(grid, args.sides[side].plain, block), size, first};
  for (int row = threadIdx.x; row < kRows; row += blockDim.x) {
    Int3 c;
    const bool exists = rows.coordinate(row, c);
    bias[row] =
        exists ? rules::flat_index(c, grid.size) * (side == queries ? args.bias.query : args.bias.key) : nowhere;
    rules::Coordinate x{};
    if (exists) x = side == queries ? rules::query_coordinate(program, c) : rules::key_coordinate(program, c);
    for (int n = 0; n < 3; ++n) at[n][row] = static_cast<std::int32_t>(x[n]);
  }
}

/// Turns a lane's products into scores; derivatives: of the soft cap. row_of: the row of each slot.
template <class Shared, class T, int kRowGroups, int kTiles>
__device__ __noinline__ void finish_scores(const BackwardArgs& args, const Shared& shared,
                                           const typename Shared::Stage& stage, const int (&row_of)[kRowGroups],
                                           T (&s)[kRowGroups][2 * kTiles], T (&derivatives)[kRowGroups][2 * kTiles]) {
  const ScoreTerms<T> terms(args, shared.task.b, shared.task.h);
#pragma unroll 1
  for (int i = 0; i < kRowGroups; ++i) {
    const int row = row_of[i];
#pragma unroll 1
    for (int n = 0; n < 2 * kTiles; ++n) {
      const int column = 8 * (n / 2) + 2 * (lane_number() % 4) + n % 2;
      const auto gap = [&](int axis) { return static_cast<T>(shared.own_at[axis][row] - stage.at[axis][column]); };
      T derivative = 1;
      s[i][n] = terms.finish(s[i][n], shared.own_bias[row], stage.bias[column], gap, derivative);
      derivatives[i][n] = derivative;
    }
  }
}

/// Stores a tile of the bias's gradient, summed over the axes along which the bias is broadcast. sum: (kRows, 64).
template <class Shared, int kRows, class T>
__device__ __noinline__ void store_bias(const BackwardArgs& args, const Shared& shared, const T* sum) {
  const auto& task = shared.task;
  const bool own_whole = task.whole_own(args), other_whole = task.whole_other(args);
  const auto place = [&](Side side, std::int32_t block, std::int32_t entry) {
    const BlockRows rows{box_of(args.sides[side].grid, args.sides[side].plain, block), args.sides[side].grid.size,
                         entry};
    Int3 c;
    if (!rows.coordinate(0, c)) return nowhere;
    return rules::flat_index(c, args.sides[side].grid.size) * (side == queries ? args.dbias.query : args.dbias.key);
  };
  const int rows = own_whole ? 1 : kRows, columns = other_whole ? 1 : 64;
  for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
    const int row = i / columns, column = i % columns;
    const auto own_at = own_whole ? 0 : place(task.own, task.block, task.first_row + row);
    const auto other_at = other_whole ? 0 : place(static_cast<Side>(1 - task.own), task.other_block, column);
    if (own_at == nowhere || other_at == nowhere) continue;
    double all = 0;  // adds sums of rows, because one long sum would round more
    for (int r = row; r < (own_whole ? kRows : row + 1); ++r) {
      double of_row = 0;
      for (int c = column; c < (other_whole ? 64 : column + 1); ++c) of_row += static_cast<double>(sum[r * 64 + c]);
      all += of_row;
    }
    const auto head = task.first_b * args.dbias.batch + task.first_h * args.dbias.head;
    write_number(args.dbias, head + own_at + other_at, all);
  }
}

}  // namespace anyflash::cuda
