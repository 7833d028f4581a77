// The cost model's constants, measured, and its predictions, compared.
#pragma once

#include <string>

namespace anyflash::cli {

/// Measures in some seconds and writes the file that explain reads, or `output`.
void calibrate(const std::string& output, bool quiet);

/// Prints predicted and measured times of some calls, and the worst ratio.
void predict();

}  // namespace anyflash::cli
