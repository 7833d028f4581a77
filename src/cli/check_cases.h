// Random calls for `check`: every rule, with features, layouts and shapes drawn from a seed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "call.h"

namespace anyflash::cli {

/// A rule to be checked, and what it needs.
struct CheckedRule {
  std::string text;
  int dimensions = 1;
};

/// Every rule of the specification, combinations of them, in 1, 2 and 3 dimensions. Tables are named ids_q, ids_k,
/// bitmap and mask.
const std::vector<CheckedRule>& checked_rules();

struct CheckCase {
  Call call;
  OwnedTensor dout;
  std::optional<OwnedTensor> dlse;
  std::string description;  ///< layout, shapes and features in one line
};

CheckCase random_case(const CheckedRule& rule, ElementType type, Align align, std::uint64_t seed);

/// Normally distributed numbers.
OwnedTensor random_normal(ElementType type, const Shape& shape, std::uint64_t seed);
OwnedTensor random_dout(const Call& call, std::uint64_t seed);

}  // namespace anyflash::cli
