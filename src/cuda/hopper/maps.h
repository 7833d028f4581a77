// Describes rows of tensors to Hopper's copy engine.
#pragma once

#include "cuda/hopper/row_map.h"
#include "cuda/portable/args.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// Are they rows that the copy engine takes, if they are given?
inline bool whole(const Rows& rows) { return !rows.data || rows.vectors; }

/// Rows of heads of 16-bit types: boxes of 64 channels of a block of the grid. False if the copy engine does not take
/// them: rows that do not begin on 16 bytes, steps over 8, no way to count heads and batch entries together where the
/// sequence has three dimensions. once: each row is read once, in order: the memory is not asked for more at a time
/// than a box has (rows of one sequence alone).
bool map_rows(RowMap& map, const Rows& rows, std::int64_t channels, const Grid& grid, std::int64_t heads,
              std::int64_t batch, bool once = false);

/// The same of float64, of a sequence of one dimension: boxes of 16 channels of box_rows rows.
bool map_double_rows(CUtensorMap& map, const Rows& rows, std::int64_t channels, std::int64_t length, int box_rows,
                     std::int64_t heads, std::int64_t batch);

/// A bias of rows of 16 or 32 bits, key by key: boxes of 128 bytes of 64 queries. False as above, or if one number
/// stands for all keys.
bool map_bias(CUtensorMap& map, const Bias& bias);

}  // namespace anyflash::cuda
