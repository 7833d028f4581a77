// A picture as text and as SVG.
#include <algorithm>
#include <array>
#include <cstdio>
#include <map>

#include <anyflash/explain.h>

namespace anyflash {
namespace {

/// 0 for nothing, 4 for all, 1 to 3 between.
int shade_level(std::uint8_t grey) {
  if (grey == 0 || grey == 255) return grey == 0 ? 0 : 4;
  return 1 + (grey - 1) * 3 / 254;
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&': result += "&amp;"; break;
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '"': result += "&quot;"; break;
      default: result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return result;
}

/// For each grey level above 0 the SVG path of its pixels: runs within a row, a run's rows merged while they repeat.
std::map<int, std::string> paths_of(const Picture& picture) {
  std::map<int, std::string> paths;
  const auto row_at = [&](int y) { return picture.grey.begin() + std::ptrdiff_t(y) * picture.width; };
  for (int y = 0; y < picture.height;) {
    int rows = 1;
    while (y + rows < picture.height && std::equal(row_at(y), row_at(y + 1), row_at(y + rows))) ++rows;
    for (int x = 0; x < picture.width;) {
      const auto grey = row_at(y)[x];
      int columns = 1;
      while (x + columns < picture.width && row_at(y)[x + columns] == grey) ++columns;
      if (grey > 0) {
        std::array<char, 80> rectangle;
        std::snprintf(rectangle.data(), rectangle.size(), "M%d %dh%dv%dh-%dz", x, y, columns, rows, columns);
        paths[grey] += rectangle.data();
      }
      x += columns;
    }
    y += rows;
  }
  return paths;
}

void check(const Picture& picture) {
  if (picture.width >= 0 && picture.height >= 0 &&
      picture.grey.size() == std::size_t(picture.width) * std::size_t(picture.height)) {
    return;
  }
  throw Error(Error::Kind::value, "picture: " + std::to_string(picture.grey.size()) + " pixels, expected width " +
                                      std::to_string(picture.width) + " times height " +
                                      std::to_string(picture.height));
}

}  // namespace

std::string picture_text(const Picture& picture) {
  check(picture);
  static constexpr std::array<const char*, 5> shades = {" ", "░", "▒", "▓", "█"};
  std::string text;
  for (int y = 0; y < picture.height; y += 2) {
    for (int x = 0; x < picture.width; ++x) {
      const auto level = [&](int row) {
        return row < picture.height ? shade_level(picture.grey[std::size_t(row) * picture.width + x]) : 0;
      };
      const int upper = level(y), lower = level(y + 1);
      if (std::abs(upper - lower) >= 2) {
        text += upper > lower ? "▀" : "▄";
      } else {
        text += shades[(upper + lower + 1) / 2 - (upper + lower == 7)];  // only 4 and 4 are all of it
      }
    }
    text += '\n';
  }
  return text;
}

std::string picture_svg(const Picture& picture, const std::string& title) {
  check(picture);
  constexpr int left = 34, top = 46, right = 12, bottom = 12, longest_side = 512;
  const int width = std::max(picture.width, 1), height = std::max(picture.height, 1);
  const double pixel = double(longest_side) / std::max(width, height);
  const double drawn_width = width * pixel, drawn_height = height * pixel;
  constexpr double letter = 7.8;  // wide, of the bold title
  const double total_width = std::max(left + drawn_width + right, left + letter * double(title.size()) + right);
  const auto count = [](std::int64_t number) { return std::to_string(number); };

  std::array<char, 1024> text;
  std::snprintf(text.data(), text.size(),
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
                "font-family=\"sans-serif\" font-size=\"13\">\n",
                total_width, top + drawn_height + bottom, total_width, top + drawn_height + bottom);
  std::string svg = text.data();
  svg += "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
  svg += "<text x=\"34\" y=\"18\" font-weight=\"bold\">" + escaped(title) + "</text>\n";
  svg += "<text x=\"34\" y=\"38\" fill=\"#555\">" + count(picture.keys) + " keys \u2192</text>\n";
  svg += "<text transform=\"translate(24 46) rotate(90)\" fill=\"#555\">" + count(picture.queries) +
         " queries \u2192</text>\n";
  std::snprintf(text.data(), text.size(),
                "<g transform=\"translate(%d %d) scale(%.6g)\" shape-rendering=\"crispEdges\">\n"
                "<rect width=\"%d\" height=\"%d\" fill=\"#f2f2f2\"/>\n",
                left, top, pixel, width, height);
  svg += text.data();
  for (const auto& [grey, path] : paths_of(picture)) {
    // From the background's light grey to dark blue.
    const auto blend = [grey = grey](int from, int to) { return from + (to - from) * grey / 255; };
    std::snprintf(text.data(), text.size(), "<path fill=\"#%02x%02x%02x\" d=\"", blend(0xd6, 0x1f), blend(0xe0, 0x4e),
                  blend(0xf0, 0x9b));
    svg += text.data() + path + "\"/>\n";
  }
  return svg + "</g>\n</svg>\n";
}

}  // namespace anyflash
