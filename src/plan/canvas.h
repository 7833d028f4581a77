// What a picture is drawn on: an SVG document, or pixels.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include <anyflash/explain.h>

namespace anyflash::planning {

struct Colour {
  int red, green, blue;
};

/// Where a text's anchor point is in it, along its direction. Across it all texts are centred.
enum class Anchor : std::uint8_t { start, middle, end };

class Canvas {
 public:
  virtual ~Canvas() = default;
  virtual double letter_width() const = 0;
  virtual double letter_height() const = 0;
  /// The side of a pixel of a picture whose longer side has `longest` pixels.
  virtual double pixel(int longest) const = 0;

  virtual void resize(double width, double height) = 0;  ///< once, first; white
  virtual void rectangle(double x, double y, double width, double height, Colour colour) = 0;
  /// upwards: turned by a quarter, to be read from below.
  virtual void text(double x, double y, std::string_view text, Anchor anchor, bool upwards = false) = 0;
  /// The picture's pixels above grey 0, in the colour that colour_of(grey) gives.
  virtual void pixels(double x, double y, double pixel_x, double pixel_y, const Picture& picture) = 0;
};

Colour colour_of(int grey);

/// Throws Error unless the picture has as many pixels as its sides say.
void check(const Picture& picture);

/// An SVG document with what `draw` draws; it resizes the canvas first.
std::string svg(const std::function<void(Canvas&)>& draw);

/// Draws a picture with its title, axes and legend.
void draw(Canvas& canvas, const Picture& picture, const std::string& title);

}  // namespace anyflash::planning
