// The two canvases: an SVG document, and pixels in RGB with a font of their own.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>

#include "plan/canvas.h"
#include "plan/font.h"

namespace anyflash {
namespace planning {
namespace {

std::string escaped(std::string_view text) {
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

template <class... Values>
std::string formatted(const char* format, Values... values) {
  std::array<char, 320> text;
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

std::string name_of(Colour colour) { return formatted("#%02x%02x%02x", colour.red, colour.green, colour.blue); }

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
      if (grey > 0) paths[grey] += formatted("M%d %dh%dv%dh-%dz", x, y, columns, rows, columns);
      x += columns;
    }
    y += rows;
  }
  return paths;
}

class SvgCanvas : public Canvas {
 public:
  double letter_width() const override { return 7.8; }
  double letter_height() const override { return 12; }
  double pixel(int longest) const override { return 512.0 / longest; }

  void resize(double width, double height) override {
    document = formatted(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
        "font-family=\"monospace\" font-size=\"13\">\n",
        width, height, width, height);
    rectangle(0, 0, width, height, {255, 255, 255});
  }

  void rectangle(double x, double y, double width, double height, Colour colour) override {
    document += formatted("<rect x=\"%.6g\" y=\"%.6g\" width=\"%.6g\" height=\"%.6g\" fill=\"%s\"/>\n", x, y, width,
                          height, name_of(colour).c_str());
  }

  void text(double x, double y, std::string_view text, Anchor anchor, bool upwards) override {
    static constexpr std::array<const char*, 3> anchors = {"", " text-anchor=\"middle\"", " text-anchor=\"end\""};
    constexpr double below = 4.5;  // from a text's middle to its baseline
    document += formatted("<text transform=\"translate(%.6g %.6g)%s\"%s>", x + (upwards ? below : 0),
                          y + (upwards ? 0 : below), upwards ? " rotate(-90)" : "", anchors[std::size_t(anchor)]);
    document += escaped(text) + "</text>\n";
  }

  void pixels(double x, double y, double pixel_x, double pixel_y, const Picture& picture) override {
    document += formatted("<g transform=\"translate(%.6g %.6g) scale(%.6g %.6g)\" shape-rendering=\"crispEdges\">\n", x,
                          y, pixel_x, pixel_y);
    for (const auto& [grey, path] : paths_of(picture)) {
      document += "<path fill=\"" + name_of(colour_of(grey)) + "\" d=\"" + path + "\"/>\n";
    }
    document += "</g>\n";
  }

  std::string document;
};

class PixelCanvas : public Canvas {
 public:
  explicit PixelCanvas(int longest) : scale_(std::max(2, longest / 512)) {}

  double letter_width() const override { return (glyph_columns + 1) * scale_; }
  double letter_height() const override { return glyph_rows * scale_; }
  double pixel(int longest) const override { return std::max(1, 512 / longest); }

  void resize(double width, double height) override {
    image = {int(std::ceil(width)), int(std::ceil(height)), {}};
    image.rgb.assign(std::size_t(image.width) * image.height * 3, 255);
  }

  void rectangle(double x, double y, double width, double height, Colour colour) override {
    const int left = place(x), right = std::max(place(x + width), left + 1);
    const int top = place(y), bottom = std::max(place(y + height), top + 1);
    for (int row = std::max(top, 0); row < std::min(bottom, image.height); ++row) {
      for (int column = std::max(left, 0); column < std::min(right, image.width); ++column) set(column, row, colour);
    }
  }

  void text(double x, double y, std::string_view text, Anchor anchor, bool upwards) override {
    const double length = double(text.size()) * letter_width();
    const double start = anchor == Anchor::start ? 0 : anchor == Anchor::middle ? length / 2 : length;
    for (std::size_t i = 0; i < text.size(); ++i) {
      for (int column = 0; column < glyph_columns; ++column) {
        for (int row = 0; row <= glyph_rows; ++row) {
          if (!glyph_pixel(text[i], column, row)) continue;
          const double along = double(i) * letter_width() + column * scale_ - start;
          const double across = row * scale_ - letter_height() / 2;
          const double left = std::floor(x + (upwards ? across : along));
          const double top = std::floor(y + (upwards ? -along - scale_ : across));
          rectangle(left, top, scale_, scale_, {0x30, 0x30, 0x30});
        }
      }
    }
  }

  void pixels(double x, double y, double pixel_x, double pixel_y, const Picture& picture) override {
    for (int row = 0; row < picture.height; ++row) {
      for (int column = 0; column < picture.width; ++column) {
        const int grey = picture.grey[std::size_t(row) * picture.width + column];
        if (grey == 0) continue;
        rectangle(place(x) + column * pixel_x, place(y) + row * pixel_y, pixel_x, pixel_y, colour_of(grey));
      }
    }
  }

  Image image;

 private:
  static int place(double at) { return int(std::lround(at)); }

  void set(int column, int row, Colour colour) {
    auto* const at = &image.rgb[(std::size_t(row) * image.width + column) * 3];
    at[0] = std::uint8_t(colour.red), at[1] = std::uint8_t(colour.green), at[2] = std::uint8_t(colour.blue);
  }

  int scale_;  // pixels of a glyph's pixel
};

}  // namespace

std::string svg(const std::function<void(Canvas&)>& draw) {
  SvgCanvas canvas;
  draw(canvas);
  return canvas.document + "</svg>\n";
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

}  // namespace planning

std::string picture_svg(const Picture& picture, const std::string& title) {
  planning::check(picture);
  return planning::svg([&](planning::Canvas& canvas) { planning::draw(canvas, picture, title); });
}

Image picture_image(const Picture& picture, const std::string& title) {
  planning::check(picture);
  planning::PixelCanvas canvas(std::max(picture.width, picture.height));
  planning::draw(canvas, picture, title);
  return std::move(canvas.image);
}

}  // namespace anyflash
