// The library next to the reference on one call.
#pragma once

#include <string>
#include <vector>

#include "call.h"
#include "layouts.h"

namespace anyflash::cli {

/// One result's largest error, and the largest that the specification allows: twice that of the textbook formula in the
/// inputs' type, plus one unit in the last place.
struct Measured {
  std::string tensor;
  double error = 0, bar = 0;
  bool passed() const { return error <= bar; }
  double share() const { return bar > 0 ? error / bar : (error > 0 ? 1e300 : 0); }
};

/// Runs forward, and backward if dout is given, and compares every result. Throws Error if the library does.
std::vector<Measured> compare(const Call& call, const OwnedTensor* dout, const OwnedTensor* dlse);

}  // namespace anyflash::cli
