// The constants of the cost model: built in, or from a small JSON file of numbers by name.
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include <anyflash/explain.h>

namespace anyflash {
namespace {

/// visit(name, number) for each number of a calibration.
template <typename Calibration, typename Visit>
void for_each_number(Calibration& calibration, const Visit& visit) {
  const auto of_type = [&](const std::string& type, auto& speed) {
    visit(type + ".forward_tile", speed.forward_tile);
    visit(type + ".forward_channel", speed.forward_channel);
    visit(type + ".backward_tile", speed.backward_tile);
    visit(type + ".backward_channel", speed.backward_channel);
    visit(type + ".partial", speed.partial);
    visit(type + ".backward_partial", speed.backward_partial);
    visit(type + ".number", speed.number);
  };
  of_type("float16", calibration.float16);
  of_type("bfloat16", calibration.bfloat16);
  of_type("float32", calibration.float32);
  of_type("float64", calibration.float64);
  visit("step", calibration.step);
  visit("parallel", calibration.parallel);
}

/// Measured on two threads of a server with AVX-512 and bfloat16 products.
Calibration built_in() {
  Calibration made;
  made.float32 = {6.1e-7, 3.0e-8, 5.9e-7, 7.8e-8, 0.89, 0.68, 2.5e-10};
  made.float16 = {5.4e-7, 3.0e-8, 6.2e-7, 7.7e-8, 0.89, 0.69, 2.5e-10};
  made.bfloat16 = {6.8e-7, 1.4e-8, 8.1e-7, 3.8e-8, 0.94, 0.54, 2.5e-10};
  made.float64 = {8.1e-7, 6.3e-8, 1.3e-6, 1.6e-7, 0.82, 0.84, 5e-10};
  made.step = 9e-6, made.parallel = 1.9, made.threads = 2;
  return made;
}

/// An environment variable; empty if it is not set.
std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

Calibration read_file() {
  const auto path = calibration_path();
  const bool asked_for = !variable("ANYFLASH_CALIBRATION").empty();
  std::ifstream file(path);
  std::ostringstream text;
  if (path.empty() || !file || !(text << file.rdbuf())) {
    if (asked_for) throw Error(Error::Kind::value, "calibration: " + shown(path, 200) + ", cannot be read");
    return built_in();
  }
  try {
    return parse_calibration(text.str(), path);
  } catch (const Error&) {
    if (asked_for) throw;
    return built_in();  // a damaged file that nobody named is no reason to fail a call
  }
}

}  // namespace

const Calibration& calibration() {
  static const auto& read = *new Calibration(read_file());  // never destroyed: calls may come while the process ends
  return read;
}

std::string calibration_path() {
  if (const auto path = variable("ANYFLASH_CALIBRATION"); !path.empty()) return path;
  auto folder = variable("XDG_CACHE_HOME");
  if (folder.empty() && !variable("HOME").empty()) folder = variable("HOME") + "/.cache";
  return folder.empty() ? "" : folder + "/anyflash/calibration.json";
}

std::string calibration_text(const Calibration& calibration) {
  std::string text = "{\n";
  for_each_number(calibration, [&](const std::string& name, const double& number) {
    char line[96];
    std::snprintf(line, sizeof(line), "  \"%s\": %.6g,\n", name.c_str(), number);
    text += line;
  });
  return text + "  \"threads\": " + std::to_string(calibration.threads) + "\n}\n";
}

Calibration parse_calibration(const std::string& text, const std::string& source) {
  Calibration made;
  made.source = source;
  const auto read = [&](const std::string& name, double& number) {
    const auto at = text.find('"' + name + "\":");
    const auto* const from = at == std::string::npos ? "" : text.c_str() + at + name.size() + 3;
    char* end = nullptr;
    number = std::strtod(from, &end);
    if (end == from || !std::isfinite(number) || number < 0)
      throw Error(Error::Kind::value, "calibration: " + shown(source, 200) + ", expected a number as \"" + name + "\"");
  };
  for_each_number(made, read);
  double threads = 0;
  read("threads", threads);
  if (!(threads >= 1 && threads <= 65536))
    throw Error(Error::Kind::value, "calibration: " + shown(source, 200) + ", expected 1 to 65536 as \"threads\"");
  made.threads = static_cast<int>(threads);
  return made;
}

}  // namespace anyflash
