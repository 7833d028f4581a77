// Pictures of a report: the memory of every tile, the phases, who sends to whom, live memory over time.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>

#include <anyflash/tile_machine.h>

#include "plan/canvas.h"

namespace anyflash {
namespace {

using planning::Anchor;
using planning::Canvas;
using planning::Colour;

constexpr Colour ink{0x80, 0x80, 0x80}, paper{0xf2, 0xf2, 0xf2}, compute_colour{0x4a, 0x7f, 0xc9},
    idle_colour{0xc9, 0xda, 0xf0}, exchange_colour{0xe0, 0x9b, 0x3a}, sync_colour{0xb5, 0x4a, 0x4a};
constexpr double margin = 12, line = 18, left = 96, width = 560;

std::string text_of(const char* format, double number) {
  std::array<char, 48> text;
  std::snprintf(text.data(), text.size(), format, number);
  return text.data();
}

/// "12.3 KiB".
std::string bytes_text(double bytes) {
  static constexpr std::array<const char*, 4> units = {"%.0f B", "%.1f KiB", "%.1f MiB", "%.1f GiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < units.size(); ++unit) bytes /= 1024;
  return text_of(units[unit], bytes);
}

/// "1.2 M".
std::string cycles_text(double cycles) {
  static constexpr std::array<const char*, 4> units = {"%.0f", "%.3g k", "%.3g M", "%.3g G"};
  std::size_t unit = 0;
  for (; cycles >= 1e3 && unit + 1 < units.size(); ++unit) cycles /= 1e3;
  return text_of(units[unit], cycles);
}

/// A share of a maximum, from the faintest to the strongest blue; grey for nothing.
Colour shade(double share) {
  constexpr Colour faint{0xdc, 0xe8, 0xf6}, strong{0x17, 0x3f, 0x85};
  if (share <= 0) return paper;
  const auto blend = [&](int from, int to) { return from + int(std::lround((to - from) * std::min(share, 1.0))); };
  return {blend(faint.red, strong.red), blend(faint.green, strong.green), blend(faint.blue, strong.blue)};
}

struct Panel {
  double height;  ///< below the title
  std::string title;
  std::function<void(Canvas&, double)> draw;  ///< at this height of the drawing
};

void draw_ramp(Canvas& canvas, double top, const std::string& least, const std::string& most) {
  constexpr int steps = 32;
  const double side = 160.0 / steps;
  canvas.text(left, top + 6, least, Anchor::start);
  const double from = left + canvas.letter_width() * double(least.size() + 1);
  for (int i = 0; i < steps; ++i) canvas.rectangle(from + i * side, top, side + 0.5, 12, shade((i + 0.5) / steps));
  canvas.text(from + 160 + canvas.letter_width(), top + 6, most, Anchor::start);
}

Panel memory_panel(const TileReport& report) {
  const auto tiles = std::int64_t(report.peak_bytes_of_tile.size());
  auto columns = report.machine.mesh_columns;
  if (columns <= 0) columns = std::int64_t(std::ceil(std::sqrt(1.5 * double(std::max<std::int64_t>(tiles, 1)))));
  const auto rows = (tiles + columns - 1) / std::max<std::int64_t>(columns, 1);
  const double side = std::min({width / double(columns), 360.0 / double(std::max<std::int64_t>(rows, 1)), 40.0});
  const double height = side * double(rows);
  const double capacity = double(report.machine.memory_per_tile);
  return {height + 2 * line,
          "Memory: the most that is live on each tile. Fullest: tile " + std::to_string(report.peak_tile) + ", " +
              bytes_text(double(report.peak_bytes)),
          [=, &report](Canvas& canvas, double top) {
            const double gap = std::min(1.0, side / 8);
            for (std::int64_t tile = 0; tile < tiles; ++tile)
              canvas.rectangle(left + side * double(tile % columns), top + side * double(tile / columns), side - gap,
                               side - gap, shade(double(report.peak_bytes_of_tile[tile]) / capacity));
            draw_ramp(canvas, top + height + line / 2, "0", bytes_text(capacity) + " of a tile");
          }};
}

struct Span {
  double start, length;
};

/// When the phases exchange, compute and wait. With overlap a wave's exchange runs beside its computation.
struct Times {
  std::vector<Span> exchange, compute, sync;
  double end = 0;

  explicit Times(const TileReport& report) {
    double exchange_at = 0, compute_at = 0;
    std::string wave;
    for (const auto& phase : report.phases) {
      const auto of = phase.name.substr(0, phase.name.find(':') == std::string::npos ? 0 : phase.name.find(':'));
      if (!report.machine.overlap || of != wave || exchange.empty())
        exchange_at = compute_at = std::max(exchange_at, compute_at);
      wave = of;
      exchange.push_back({exchange_at, phase.exchange_cycles});
      exchange_at += phase.exchange_cycles;
      if (!report.machine.overlap) compute_at = exchange_at;
      compute.push_back({compute_at, phase.compute_cycles});
      compute_at += phase.compute_cycles;
      sync.push_back({compute_at, phase.sync_cycles});
      compute_at += phase.sync_cycles;
    }
    end = std::max({exchange_at, compute_at, 1.0});
  }
};

void draw_spans(Canvas& canvas, const std::vector<Span>& spans, double scale, double top, double height,
                Colour colour) {
  for (std::size_t i = 0; i < spans.size();) {  // spans nearer to each other than a third of a pixel become one
    const double from = spans[i].start;
    double to = from + spans[i].length;
    for (++i; i < spans.size() && (spans[i].start - to) * scale < 0.34; ++i) to = spans[i].start + spans[i].length;
    if (to > from) canvas.rectangle(left + from * scale, top, std::max((to - from) * scale, 0.3), height, colour);
  }
}

/// The mean over all tiles in each phase, if there is a trace.
std::vector<Span> mean_compute(const TileReport& report, const Times& times) {
  const auto tiles = std::size_t(report.machine.tiles);
  if (report.tile_compute_cycles.size() != report.phases.size() * tiles) return {};
  std::vector<Span> spans;
  for (std::size_t p = 0; p < report.phases.size(); ++p) {
    double sum = 0;
    for (std::size_t t = 0; t < tiles; ++t) sum += report.tile_compute_cycles[p * tiles + t];
    spans.push_back({times.compute[p].start, sum / double(tiles)});
  }
  return spans;
}

void draw_time_axis(Canvas& canvas, double top, double cycles) {
  canvas.rectangle(left, top, width, 1, ink);
  for (int i = 0; i <= 4; ++i) {
    const double at = left + width * i / 4;
    canvas.rectangle(at, top, 1, 5, ink);
    canvas.text(at, top + 13, cycles_text(cycles * i / 4) + (i == 4 ? " cycles" : ""),
                i == 4   ? Anchor::end
                : i == 0 ? Anchor::start
                         : Anchor::middle);
  }
}

Panel phases_panel(const TileReport& report) {
  return {6 * line,
          "Phases: " + std::to_string(report.phases.size()) + ", in " + cycles_text(report.cycles) + " cycles",
          [&report](Canvas& canvas, double top) {
            const Times times(report);
            const double scale = width / times.end, high = line - 4;
            const auto lane = [&](int number, const char* name) {
              canvas.text(left - 6, top + number * line + high / 2, name, Anchor::end);
              canvas.rectangle(left, top + number * line, width, high, paper);
              return top + number * line;
            };
            draw_spans(canvas, times.exchange, scale, lane(0, "exchange"), high, exchange_colour);
            const auto mean = mean_compute(report, times);
            const auto at = lane(1, "compute");
            draw_spans(canvas, times.compute, scale, at, high, mean.empty() ? compute_colour : idle_colour);
            draw_spans(canvas, mean, scale, at, high, compute_colour);
            draw_spans(canvas, times.sync, scale, lane(2, "sync"), high, sync_colour);
            draw_time_axis(canvas, top + 3 * line, times.end);
            if (mean.empty()) return;
            canvas.rectangle(left, top + 4.7 * line, 12, 12, compute_colour);
            canvas.text(left + 18, top + 4.7 * line + 6, "mean of all tiles", Anchor::start);
            canvas.rectangle(left + 190, top + 4.7 * line, 12, 12, idle_colour);
            canvas.text(left + 208, top + 4.7 * line + 6, "slowest tile, on which the others wait", Anchor::start);
          }};
}

Panel transfers_panel(const TileReport& report) {
  constexpr double side = 360;
  return {side + 3 * line, "Who sends to whom: bytes, " + bytes_text(double(report.exchanged_bytes)) + " in all",
          [&report](Canvas& canvas, double top) {
            const auto tiles = std::max<std::int64_t>(report.machine.tiles, 1);
            const auto buckets = std::min<std::int64_t>(tiles, 92);
            std::map<std::pair<std::int64_t, std::int64_t>, double> sums;
            double most = 0;
            for (const auto& one : report.transfers) {
              if (one.from < 0 || one.to < 0) continue;
              auto& sum = sums[{one.from * buckets / tiles, one.to * buckets / tiles}];
              most = std::max(most, sum += double(one.bytes));
            }
            const double cell = side / double(buckets);
            canvas.rectangle(left, top + line, side, side, paper);
            for (const auto& [pair, bytes] : sums)
              canvas.rectangle(left + cell * double(pair.second), top + line + cell * double(pair.first), cell, cell,
                               shade(bytes / most));
            canvas.text(left + side / 2, top + 6, "to tile", Anchor::middle);
            canvas.text(left, top + 6, "0", Anchor::start);
            canvas.text(left + side, top + 6, std::to_string(tiles - 1), Anchor::end);
            canvas.text(left - 14, top + line + side / 2, "from tile", Anchor::middle, true);
            const auto each = tiles > buckets ? " between about " + std::to_string((tiles + buckets / 2) / buckets) +
                                                    " and as many tiles"
                                              : std::string(" between two tiles");
            draw_ramp(canvas, top + side + 1.6 * line, "0", bytes_text(most) + each);
          }};
}

Panel live_panel(const TileReport& report) {
  constexpr double high = 160;
  return {high + 3 * line, "Live memory over time", [&report](Canvas& canvas, double top) {
            const Times times(report);
            const double scale = width / times.end, capacity = double(report.machine.memory_per_tile);
            const double most = std::max(capacity, double(report.peak_bytes));
            canvas.rectangle(left, top, width, high, paper);
            const auto bar = [&](double from, double to, double bytes, Colour colour) {
              const double tall = high * bytes / most;
              canvas.rectangle(left + from * scale, top + high - tall, std::max((to - from) * scale, 0.3), tall,
                               colour);
            };
            const auto start = [&](std::size_t p) { return std::min(times.exchange[p].start, times.compute[p].start); };
            for (std::size_t p = 0; p < report.phases.size();) {
              const double from = start(p);
              double fullest = 0, mean = 0, to = from;
              for (; p < report.phases.size() && (to == from || (to - from) * scale < 1); ++p) {
                fullest = std::max(fullest, double(report.phases[p].live_bytes_max));
                mean = std::max(mean, report.phases[p].live_bytes_mean);
                to = p + 1 < report.phases.size() ? start(p + 1) : times.end;
              }
              bar(from, to, fullest, idle_colour);
              bar(from, to, mean, compute_colour);
            }
            const double limit = top + high * (1 - capacity / most);
            canvas.rectangle(left, limit, width, 1.5, sync_colour);
            canvas.text(left - 6, limit + 6, bytes_text(capacity), Anchor::end);
            canvas.text(left - 6, top + high - 6, "0", Anchor::end);
            draw_time_axis(canvas, top + high, times.end);
            const double words = top + high + 1.8 * line;
            canvas.rectangle(left, words, 12, 12, compute_colour);
            canvas.text(left + 18, words + 6, "mean of all tiles", Anchor::start);
            canvas.rectangle(left + 190, words, 12, 12, idle_colour);
            canvas.text(left + 208, words + 6, "fullest tile", Anchor::start);
            canvas.rectangle(left + 350, words + 5, 12, 2, sync_colour);
            canvas.text(left + 368, words + 6, "all that a tile has", Anchor::start);
          }};
}

}  // namespace

std::string tile_picture_svg(const TileReport& report, TilePicture picture) {
  if (picture == TilePicture::transfers && report.transfers.empty() && report.live_bytes.empty())
    throw Error(Error::Kind::value, "picture: transfers of a report without trace, expected one with it");
  std::vector<Panel> panels;
  const auto wanted = [&](TilePicture one) { return picture == TilePicture::all || picture == one; };
  if (wanted(TilePicture::memory)) panels.push_back(memory_panel(report));
  if (wanted(TilePicture::phases)) panels.push_back(phases_panel(report));
  if (picture == TilePicture::transfers || (wanted(TilePicture::transfers) && !report.transfers.empty()))
    panels.push_back(transfers_panel(report));
  if (wanted(TilePicture::live)) panels.push_back(live_panel(report));
  return planning::svg([&](Canvas& canvas) {
    double height = margin;
    for (const auto& panel : panels) height += 1.5 * line + panel.height + margin;
    canvas.resize(left + width + margin, height);
    double top = margin;
    for (const auto& panel : panels) {
      canvas.text(margin, top + 6, panel.title, Anchor::start);
      panel.draw(canvas, top + 1.5 * line);
      top += 1.5 * line + panel.height + margin;
    }
  });
}

}  // namespace anyflash
