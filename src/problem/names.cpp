#include <anyflash/names.h>

#include <algorithm>

#include <anyflash/tensor.h>

namespace anyflash {
namespace {

constexpr std::size_t longest = 64;  // longer names are not typing errors, and would take long

std::string folded(std::string_view name) {
  std::string result(name);
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
    if (c == '-') c = '_';
  }
  return result;
}

/// Letters added, dropped, changed, or swapped with their neighbour (optimal string alignment).
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before.swap(last);
    last.swap(row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
    }
  }
  return row[b.size()];
}

}  // namespace

std::string did_you_mean(std::string_view given, const Names& known) {
  if (given.empty() || given.size() > longest) return {};
  const auto name = folded(given);
  std::string_view nearest;
  std::size_t least = longest;
  for (const auto& candidate : known) {
    if (candidate.size() > longest) continue;
    const auto distance = edit_distance(name, folded(candidate));
    if (3 * distance > std::max(given.size(), candidate.size()) || distance >= least) continue;
    least = distance;
    nearest = candidate;
  }
  return nearest.empty() ? std::string() : ", did you mean '" + shown(nearest, longest) + "'?";
}

std::string unknown_name(std::string_view given, const Names& known) {
  std::string list;
  for (std::size_t i = 0; i < known.size(); ++i) {
    list += (i == 0 ? "" : i + 1 == known.size() ? " or " : ", ") + std::string(known[i]);
  }
  return "'" + shown(given) + "', expected " + list + did_you_mean(given, known);
}

std::size_t place_of_name(const std::string& what, std::string_view given, const Names& known) {
  const auto found = std::find(known.begin(), known.end(), given);
  if (found == known.end()) throw Error(Error::Kind::value, what + ": " + unknown_name(given, known));
  return std::size_t(found - known.begin());
}

}  // namespace anyflash
