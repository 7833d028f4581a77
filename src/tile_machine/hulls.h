// Which keys neighbouring rows see at most, finer than the plan's blocks: steps leave out what lies before and behind.
#pragma once

#include <cstdint>
#include <vector>

#include "tile_machine/order.h"

namespace anyflash::simulator {

/// Positions first .. end - 1 of each band of rows of a mask.
class Hulls {
 public:
  static constexpr std::int64_t band_rows = 16;
  struct Hull {
    std::int64_t first, end;
  };

  Hulls(const MaskGroup& mask, const Order& queries, const Order& keys);

  /// Of a query block's rows band * band_rows and on.
  Hull of(std::int64_t block, std::int64_t band) const { return hulls_[block * bands + band]; }

 private:
  static constexpr std::int64_t bands = Order::block_rows / band_rows;
  std::vector<Hull> hulls_;
};

}  // namespace anyflash::simulator
