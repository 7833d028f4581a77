// Names that a user writes: rules, options, alignments, layouts.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace anyflash {

/// Known names, in the order in which an error lists them.
using Names = std::vector<std::string_view>;

/// The names in an array.
template <std::size_t count>
Names names_of(const char* const (&words)[count]) {
  return Names(words, words + count);
}

/// The end of an error line about an unknown name: ", did you mean 'causal'?" with the nearest known name, or nothing
/// if none is near. Near: at most a third of the letters are added, dropped, changed or swapped with their neighbour.
/// Upper and lower case are equal, and so are - and _.
std::string did_you_mean(std::string_view given, const Names& known);

/// The error text for an unknown name: "'end', expected a, b or c, did you mean 'b'?"
std::string unknown_name(std::string_view given, const Names& known);

/// The index of a name among the known ones. Throws Error, "WHAT: " and unknown_name, if it is not known.
std::size_t place_of_name(const std::string& what, std::string_view given, const Names& known);

}  // namespace anyflash
