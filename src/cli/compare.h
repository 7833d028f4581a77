// The library compared with the reference on one call.
#pragma once

#include <string>
#include <vector>

#include "call.h"
#include "layouts.h"

namespace anyflash::cli {

/// The errors of one result. All are largest values over the tensor.
struct Measured {
  std::string tensor;
  double error = 0;           ///< of the library
  double textbook_error = 0;  ///< of the textbook formula in the inputs' type
  double unit = 0;            ///< one unit in the last place of the largest exact value
  double terms = 0;           ///< the sum of the absolute values of the terms of an exact value
};

/// Runs forward, and backward if dout is given, and measures every result. Throws Error if the library does.
std::vector<Measured> compare(const Call& call, const OwnedTensor* dout, const OwnedTensor* dlse);

}  // namespace anyflash::cli
