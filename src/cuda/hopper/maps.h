// Tensor maps: descriptions of tensors' rows for TMA.
#pragma once

#include "cuda/portable/args.h"
#include "cuda/tile/row_map.h"
#include "plan/plan.h"

namespace anyflash::cuda {

/// Can TMA load these rows, if they are given?
inline bool whole(const Rows& rows) { return !rows.data || rows.vectors; }

/// Rows of heads of 16-bit types: boxes of 64 channels of a block of the grid. False if TMA does not support them. Rows
/// must begin on 16 bytes, and steps be at most 8. Where the sequence has three dimensions, one axis must be able to
/// count heads and batch entries together. once: each row is read once, in order, so that no more is requested at a
/// time than a box has (only for rows of one sequence).
bool map_rows(RowMap& map, const Rows& rows, std::int64_t channels, const Grid& grid, std::int64_t heads,
              std::int64_t batch, bool once = false);

/// The same for float64, for a sequence of one dimension: boxes of 16 channels of box_rows rows.
bool map_double_rows(CUtensorMap& map, const Rows& rows, std::int64_t channels, std::int64_t length, int box_rows,
                     std::int64_t heads, std::int64_t batch);

/// A bias of 16 or 32 bits, key by key: boxes of 128 bytes of 64 queries. False as above, or if one number serves all
/// keys.
bool map_bias(CUtensorMap& map, const Bias& bias);

}  // namespace anyflash::cuda
