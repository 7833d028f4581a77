// The .safetensors format: eight bytes of header length, a JSON header (read and written by nlohmann-json), the data.
#pragma once

#include <string>
#include <vector>

#include "owned_tensor.h"

namespace anyflash::cli {

std::vector<std::string> safetensors_names(const std::string& path);
OwnedTensor read_safetensors(const std::string& path, const std::string& entry);
void write_safetensors(const std::string& path, const NamedTensors& tensors);

}  // namespace anyflash::cli
