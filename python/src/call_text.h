// A call as text, "name=value; name=value": what JAX and TensorFlow keep of it in their programs. Scalar options stand
// in it by their names where they are not the default. Written by python/anyflash/_options.py and the two front ends.
#pragma once

#include <anyflash/names.h>
#include <anyflash/option_list.h>

#include <algorithm>
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

namespace anyflash::call_text {

/// What stands between the separators, without spaces before it, but for what is empty.
inline std::vector<std::string> parts_of(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const auto end = std::min(text.find(separator), text.size());
    const auto first = std::min(text.find_first_not_of(' '), end);
    if (first < end) parts.emplace_back(text.substr(first, end - first));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

template <typename Number>
Number number(const std::string& name, std::string_view value) {
  Number number{};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size()) {
    throw Error(Error::Kind::value, name + ": '" + shown(value) + "', expected a number");
  }
  return number;
}

inline void read(const std::string& name, std::string_view value, Align& option) {
  option = Align(place_of_name(name, value, names_of(align_names)));
}
inline void read(const std::string& name, std::string_view value, Layout& option) {
  option = Layout(place_of_name(name, value, names_of(layout_names)));
}
inline void read(const std::string& name, std::string_view value, bool& option) {
  option = number<int>(name, value) != 0;
}
template <typename Number>
void read(const std::string& name, std::string_view value, std::optional<Number>& option) {
  option = number<Number>(name, value);
}
template <typename Number>
void read(const std::string& name, std::string_view value, Number& option) {
  option = number<Number>(name, value);
}

/// Sets the scalar option of that name; false if there is none.
inline bool read_scalar(Options& options, const std::string& name, std::string_view value) {
  bool found = false;
  for_each_scalar([&](const char* known, auto member, const char*) {
    if (name != known) return;
    read(name, value, options.*member);
    found = true;
  });
  return found;
}

/// Reads a text. Scalar options go to `options`; other(name, value) is called for the rest, and says whether it knows
/// it.
template <typename Other>
void read_call(std::string_view text, Options& options, Other&& other) {
  for (const auto& part : parts_of(text, ';')) {
    const auto equals = std::min(part.find('='), part.size());
    const auto name = part.substr(0, equals);
    const auto value = std::string_view(part).substr(std::min(equals + 1, part.size()));
    if (!read_scalar(options, name, value) && !other(name, value)) {
      throw Error(Error::Kind::value, "call: '" + shown(part) + "', expected an option");
    }
  }
}

}  // namespace anyflash::call_text
