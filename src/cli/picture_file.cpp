#include "picture_file.h"

#include <png.h>

#include "owned_tensor.h"

namespace anyflash::cli {

void write_png(const std::string& path, const Image& picture) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = png_uint_32(picture.width);
  image.height = png_uint_32(picture.height);
  image.format = PNG_FORMAT_RGB;
  if (!png_image_write_to_file(&image, path.c_str(), 0, picture.rgb.data(), 3 * picture.width, nullptr))
    fail(std::string("cannot be written: ") + image.message);
}

}  // namespace anyflash::cli
