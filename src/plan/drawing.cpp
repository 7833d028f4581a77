// A picture with its title, axes and legend, on any canvas; and as text.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

#include <anyflash/explain.h>

#include "plan/canvas.h"

namespace anyflash {
namespace planning {
namespace {

constexpr Colour hidden{0xf2, 0xf2, 0xf2}, faintest{0xa9, 0xc6, 0xec}, strongest{0x4a, 0x7f, 0xc9},
    full{0x1f, 0x4e, 0x9b}, line_colour{0x80, 0x80, 0x80};
constexpr double margin = 10, tick = 5, least_side = 16;

struct Axis {
  std::int64_t entries, step;  // step between ticks; 0: none
  double length;
  std::string name;

  double place(std::int64_t entry) const { return (double(entry) + 0.5) / double(entries) * length; }
};

/// The least of 1, 2, 5, 10, 20, ... whose ticks are at least `apart` from one another.
std::int64_t tick_step(std::int64_t entries, double length, double apart) {
  if (entries == 0) return 0;
  const double least = apart * double(entries) / length;
  for (std::int64_t power = 1;; power *= 10) {
    for (const int digit : {1, 2, 5}) {
      if (double(digit * power) >= least) return digit * power;
    }
  }
}

std::vector<std::string> wrapped(const std::string& text, std::size_t most) {
  std::vector<std::string> lines;
  std::size_t from = 0;
  while (text.size() - from > most) {
    const auto space = text.rfind(' ', from + most);
    const bool fits = space != std::string::npos && space > from;
    const auto end = fits ? space : from + most;
    lines.push_back(text.substr(from, end - from));
    from = fits ? end + 1 : end;
  }
  lines.push_back(text.substr(from));
  return lines;
}

std::string counted(std::int64_t number, const char* one, const char* several) {
  return std::to_string(number) + " " + (number == 1 ? one : several);
}

struct LegendLine {
  std::vector<Colour> colours;
  std::string words;
};

std::vector<LegendLine> legend_of(const Picture& picture) {
  if (picture.grey.empty()) return {{{}, "no pairs: the pattern is empty"}};
  const bool shrunk = picture.width < picture.keys || picture.height < picture.queries;
  if (!shrunk) return {{{hidden}, "hidden"}, {{full}, "visible"}};
  std::vector<LegendLine> lines = {{{hidden}, "no pair visible"}};
  std::array<char, 80> words = {"some pairs visible"};
  if (picture.densest < 1) {
    std::snprintf(words.data(), words.size(), "some: at most %.2g %% visible", 100 * picture.densest);
  }
  LegendLine ramp{{}, words.data()};
  const int strongest_grey = picture.densest < 1 ? 255 : 254;  // 255 has a line of its own where it means all pairs
  for (int i = 0; i < 8; ++i) ramp.colours.push_back(colour_of(1 + (strongest_grey - 1) * i / 7));
  lines.push_back(std::move(ramp));
  if (picture.densest == 1) lines.push_back({{full}, "every pair visible"});
  const auto a_pixel = [](std::int64_t entries, int pixels) { return double(entries) / pixels; };
  std::snprintf(words.data(), words.size(), "a pixel: %.4g x %.4g pairs", a_pixel(picture.queries, picture.height),
                a_pixel(picture.keys, picture.width));
  lines.push_back({{}, words.data()});
  return lines;
}

void draw_axis(Canvas& canvas, const Axis& axis, double left, double top, bool down) {
  for (std::int64_t entry = 0; axis.step > 0 && entry < axis.entries; entry += axis.step) {
    const auto at = axis.place(entry);
    if (down) {
      canvas.rectangle(left - tick, top + at, tick, 1, line_colour);
      canvas.text(left - tick - 3, top + at, std::to_string(entry), Anchor::end);
    } else {
      canvas.rectangle(left + at, top - tick, 1, tick, line_colour);
      canvas.text(left + at, top - tick - 3 - canvas.letter_height() / 2, std::to_string(entry), Anchor::middle);
    }
  }
}

void draw_legend(Canvas& canvas, const std::vector<LegendLine>& legend, double left, double top) {
  const auto letter = canvas.letter_width(), height = canvas.letter_height(), swatch = 4 * letter;
  for (const auto& line : legend) {
    const auto width = swatch / double(std::max<std::size_t>(line.colours.size(), 1));
    for (std::size_t i = 0; i < line.colours.size(); ++i) {
      canvas.rectangle(left + double(i) * width, top, width, height, line.colours[i]);
    }
    canvas.text(line.colours.empty() ? left : left + swatch + letter, top + height / 2, line.words, Anchor::start);
    top += 1.5 * height;
  }
}

}  // namespace

Colour colour_of(int grey) {
  if (grey == 0 || grey == 255) return grey == 0 ? hidden : full;
  const auto blend = [grey](int from, int to) { return from + (to - from) * (grey - 1) / 253; };
  return {blend(faintest.red, strongest.red), blend(faintest.green, strongest.green),
          blend(faintest.blue, strongest.blue)};
}

void draw(Canvas& canvas, const Picture& picture, const std::string& title) {
  const auto letter = canvas.letter_width(), height = canvas.letter_height(), line = 1.5 * height;
  const int columns = std::max(picture.width, 1), rows = std::max(picture.height, 1);
  const double pixel = canvas.pixel(std::max(columns, rows));
  const double pixel_x = std::max(pixel, std::ceil(least_side / columns));
  const double pixel_y = std::max(pixel, std::ceil(least_side / rows));
  const auto label = [&](std::int64_t entries) { return letter * double(std::to_string(entries).size()); };
  Axis across{picture.keys, 0, columns * pixel_x, counted(picture.keys, "key", "keys")};
  Axis down{picture.queries, 0, rows * pixel_y, counted(picture.queries, "query", "queries")};
  across.step = tick_step(across.entries, across.length, label(across.entries) + 2 * letter);
  down.step = tick_step(down.entries, down.length, 2 * height);

  const auto legend = legend_of(picture);
  std::size_t longest = across.name.size();
  for (const auto& one : legend) longest = std::max(longest, one.words.size() + 5);
  const double left = margin + line + label(down.entries) + tick + 3;
  const double inside = std::max(across.length, letter * double(longest));
  const double width = left + inside + std::max(margin, label(across.entries) / 2);
  const auto lines = wrapped(title, std::size_t((width - 2 * margin) / letter));
  const double top = margin + double(lines.size() + 2) * line + tick;
  const double body = std::max(down.length, letter * double(down.name.size()));
  const double legend_top = top + body + height;
  canvas.resize(width, legend_top + double(legend.size()) * line + margin - height / 2);

  for (std::size_t i = 0; i < lines.size(); ++i) {
    canvas.text(margin, margin + double(i) * line + height / 2, lines[i], Anchor::start);
  }
  canvas.text(left + across.length / 2, margin + double(lines.size()) * line + height / 2, across.name,
              across.length < letter * double(across.name.size()) ? Anchor::start : Anchor::middle);
  canvas.text(margin + height / 2, top + body / 2, down.name, Anchor::middle, true);
  canvas.rectangle(left, top, across.length, down.length, hidden);
  canvas.pixels(left, top, pixel_x, pixel_y, picture);
  draw_axis(canvas, across, left, top, false);
  draw_axis(canvas, down, left, top, true);
  draw_legend(canvas, legend, left, legend_top);
}

}  // namespace planning

namespace {

/// 0 for nothing, 4 for the densest, 1 to 3 in between.
int shade_level(std::uint8_t grey) {
  if (grey == 0 || grey == 255) return grey == 0 ? 0 : 4;
  return 1 + (grey - 1) * 3 / 254;
}

}  // namespace

std::string picture_text(const Picture& picture) {
  planning::check(picture);
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
        text += shades[(upper + lower + 1) / 2 - (upper + lower == 7)];  // full only if both are 4
      }
    }
    text += '\n';
  }
  return text;
}

}  // namespace anyflash
