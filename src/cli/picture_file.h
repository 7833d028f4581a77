// Pictures as PNG, by libpng.
#pragma once

#include <anyflash/explain.h>

#include <string>

namespace anyflash::cli {

void write_png(const std::string& path, const Image& picture);

}  // namespace anyflash::cli
