// Names that a user writes: of rules, options, alignments, layouts.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace anyflash {

/// Names that are known, in the order in which an error lists them.
using Names = std::vector<std::string_view>;

/// Those of an array of words.
template <std::size_t count>
Names names_of(const char* const (&words)[count]) {
  return Names(words, words + count);
}

/// For the end of an error's line about a name that is not among the known ones: ", did you mean 'causal'?" with the
/// nearest of them, or nothing if none is near. Near: at most a third of the letters are added, dropped, changed or
/// swapped with their neighbour; upper and lower case, and - and _, are the same.
std::string did_you_mean(std::string_view given, const Names& known);

/// What an error says of a name that is not known: "'end', expected a, b or c, did you mean 'b'?"
std::string unknown_name(std::string_view given, const Names& known);

/// The place of a name among the known ones. Throws Error, "WHAT: " and unknown_name, if it is none of them.
std::size_t place_of_name(const std::string& what, std::string_view given, const Names& known);

}  // namespace anyflash
