// explain_plan: the candidates of a call, as numbers, as a table and as stacked bars.
#include <algorithm>
#include <cstdio>
#include <limits>
#include <tuple>
#include <utility>

#include <anyflash/explain.h>
#include <anyflash/tile_machine.h>

#include "backends.h"
#include "plan/chunks.h"
#include "plan/facts.h"
#include "rules/compile.h"

namespace anyflash {
namespace {

constexpr std::size_t most_shown = 24;

std::string bytes_text(std::int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = double(bytes);
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  char text[48];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text;
}

std::string time_text(double seconds) {
  char text[48];
  if (seconds <= 0) return "0";
  std::snprintf(text, sizeof(text),
                seconds < 1e-3 ? "%.0f us"
                : seconds < 1  ? "%.1f ms"
                               : "%.2f s",
                seconds < 1e-3 ? seconds * 1e6
                : seconds < 1  ? seconds * 1e3
                               : seconds);
  return text;
}

/// What a table says of a candidate's cost.
std::string cost_text(const PlanCandidate& one, double seconds) { return one.timed ? time_text(seconds) : "-"; }

std::string escaped(const std::string& text) {
  std::string made;
  for (const char c : text) {
    if (c == '<' || c == '>' || c == '&') {
      made += c == '<' ? "&lt;" : c == '>' ? "&gt;" : "&amp;";
    } else {
      made += static_cast<unsigned char>(c) < 32 ? ' ' : c;
    }
  }
  return made;
}

/// "32x46": the tiles of a group.
std::string grid_text(const PlanCandidate& one) {
  return std::to_string(one.grid_rows) + "x" + std::to_string(one.grid_columns);
}

/// Do both have the same row? One group is all groups of a call with one head.
bool same_row(const PlanCandidate& a, const PlanCandidate& b) {
  const auto row = [](const PlanCandidate& one) {
    return std::tie(one.groups, one.chunks_q, one.chunks_kv, one.threads, one.kept, one.bytes, one.grid_rows,
                    one.grid_columns, one.in_flight, one.portable);
  };
  return row(a) == row(b);
}

/// A candidate is worth a look if it is chosen, or if no other with as few bytes is as fast.
std::vector<PlanCandidate> worth_showing(std::vector<planning::Candidate> candidates) {
  std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    return a.shown.cost.total() != b.shown.cost.total() ? a.shown.cost.total() < b.shown.cost.total()
                                                        : a.shown.bytes < b.shown.bytes;
  });
  std::vector<PlanCandidate> shown;
  auto least = std::numeric_limits<std::int64_t>::max();
  for (const auto& one : candidates) {
    if (one.shown.bytes >= least && !one.shown.chosen && one.chunks.any()) continue;
    least = std::min(least, one.shown.bytes);
    const auto known =
        std::find_if(shown.begin(), shown.end(), [&](const auto& other) { return same_row(one.shown, other); });
    if (known != shown.end()) {
      if (one.shown.chosen) *known = one.shown;
      continue;
    }
    shown.push_back(one.shown);
  }
  while (shown.size() > most_shown) {  // every second one goes, but for the ends and the chosen one
    std::vector<PlanCandidate> fewer;
    for (std::size_t i = 0; i < shown.size(); ++i)
      if (i % 2 == 0 || i + 1 == shown.size() || shown[i].chosen) fewer.push_back(shown[i]);
    if (fewer.size() == shown.size()) break;
    shown = std::move(fewer);
  }
  return shown;
}

}  // namespace

PlanExplanation explain_plan(const TensorView& q, const TensorView& k, const TensorView& v, const Options& options,
                             bool backward, const Calibration& machine, const CallTensors& tensors) {
  const auto& backend = backend_of(q.device);
  auto problem = shape_problem(q, k, v, options, backward ? Direction::backward : Direction::forward, tensors);
  rules::check(problem.rule, planning::shapes_of(problem));
  PlanExplanation made;
  const bool tiles = q.device.kind == DeviceKind::tiles;
  made.calibration = tiles                               ? "tile machine " + used_tile_machine().name
                     : q.device.kind == DeviceKind::cuda ? "none: times on a GPU are not predicted"
                                                         : machine.source;
  if (!problem.has_pairs()) return made;
  const auto plan = make_plan(problem, backend.menu(problem));
  const auto candidates = planning::candidates_of(problem, *plan, machine);
  if (q.device.kind == DeviceKind::cpu) {
    made.least_bytes = candidates.front().shown.bytes;
    for (const auto& one : candidates) made.least_bytes = std::min(made.least_bytes, one.shown.bytes);
  } else {
    made.least_bytes = planning::least_bytes(problem, *plan);
  }
  made.candidates = worth_showing(candidates);
  return made;
}

std::string plan_text(const PlanExplanation& explanation) {
  const bool tiles = !explanation.candidates.empty() && explanation.candidates.front().grid_rows > 0;
  std::string text = std::string("  groups  chunks q x kv  ") + (tiles ? "  tiles  flight" : "threads    kept") +
                     "       bytes     compute      memory    exchange       total\n";
  for (const auto& one : explanation.candidates) {
    char line[200];
    const auto chunks = std::to_string(one.chunks_q) + " x " + std::to_string(one.chunks_kv);
    const auto workers = tiles ? grid_text(one) : std::to_string(one.threads);
    const auto kept = tiles ? std::to_string(one.in_flight) : one.kept > 0 ? std::to_string(one.kept) : "all";
    std::snprintf(line, sizeof(line), "%c%7lld  %13s  %7s  %6s  %10s  %10s  %10s  %10s  %10s%s%s\n",
                  one.chosen ? '*' : ' ', static_cast<long long>(one.groups), chunks.c_str(), workers.c_str(),
                  kept.c_str(), bytes_text(one.bytes).c_str(), cost_text(one, one.cost.compute).c_str(),
                  cost_text(one, one.cost.memory).c_str(), cost_text(one, one.cost.exchange).c_str(),
                  cost_text(one, one.cost.total()).c_str(), one.portable ? "  portable" : "",
                  one.fits ? "" : "  does not fit");
    text += line;
  }
  return text;
}

std::string plan_svg(const PlanExplanation& explanation, const std::string& title) {
  constexpr int left = 190, bars = 480, right = 150, row = 22, top = 58;
  double longest = 0;
  for (const auto& one : explanation.candidates)
    if (one.timed) longest = std::max(longest, one.cost.total());
  const auto height = top + row * int(explanation.candidates.size()) + 20;
  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + std::to_string(left + bars + right) +
                    "\" height=\"" + std::to_string(height) + "\" font-family=\"sans-serif\" font-size=\"12\">\n" +
                    "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  const auto label = [&](double x, double y, const char* anchor, const std::string& text, bool bold = false) {
    char at[96];
    std::snprintf(at, sizeof(at), "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>", x, y, anchor,
                  bold ? " font-weight=\"bold\"" : "");
    svg += at + escaped(text) + "</text>\n";
  };
  const auto bar = [&](double x, double y, double width, const char* colour, double opacity) {
    char text[160];
    std::snprintf(text, sizeof(text),
                  "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"14\" fill=\"%s\" opacity=\"%.2f\"/>\n", x, y,
                  width, colour, opacity);
    svg += text;
  };
  constexpr std::pair<const char*, const char*> parts[] = {
      {"compute", "#3b6fb6"}, {"memory", "#e0913a"}, {"exchange", "#58a05a"}};
  label(10, 20, "start", title, true);
  for (int i = 0; i < 3 && longest > 0; ++i) {
    bar(left + 110 * i, 30, 14, parts[i].second, 1);
    label(left + 110 * i + 20, 42, "start", parts[i].first);
  }
  const bool tiles = !explanation.candidates.empty() && explanation.candidates.front().grid_rows > 0;
  label(10, 42, "start", tiles ? "q x kv chunks, groups, tiles" : "q x kv chunks, groups, threads");
  int y = top;
  for (const auto& one : explanation.candidates) {
    const auto name = std::to_string(one.chunks_q) + " x " + std::to_string(one.chunks_kv) + ", " +
                      std::to_string(one.groups) + ", " +
                      (one.grid_rows > 0 ? grid_text(one) : std::to_string(one.threads));
    label(left - 10, y + 12, "end", name, one.chosen);
    double x = left;
    const double times[] = {one.cost.compute, one.cost.memory, one.cost.exchange};
    for (int i = 0; i < 3; ++i) {
      const double width = one.timed && longest > 0 ? times[i] / longest * bars : 0;
      if (width > 0) bar(x, y, width, parts[i].second, one.fits ? 1 : 0.3);
      x += width;
    }
    label(x + 6, y + 12, "start",
          (one.timed      ? time_text(one.cost.total()) + ", "
           : one.portable ? "portable, "
                          : "") +
              bytes_text(one.bytes) + (one.fits ? "" : ", does not fit"),
          one.chosen);
    y += row;
  }
  return svg + "</svg>\n";
}

}  // namespace anyflash
