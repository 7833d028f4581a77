// The .npz format: a zip archive (read and written by libzip) with one .npy file for each tensor.
#pragma once

#include <string>
#include <vector>

#include "owned_tensor.h"

namespace anyflash::cli {

std::vector<std::string> npz_names(const std::string& path);
OwnedTensor read_npz(const std::string& path, const std::string& entry, bool two_bytes_are_bfloat16);
void write_npz(const std::string& path, const NamedTensors& tensors);

}  // namespace anyflash::cli
