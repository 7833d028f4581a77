// How often random tests repeat, and with which numbers: the same every time, and in scripts/test --nightly more, and
// others.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace anyflash::testing {

// Under a sanitizer everything takes some ten times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr double usual_effort = 0.1;
#elif defined(__has_feature)
inline constexpr double usual_effort = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ? 0.1 : 1.0;
#else
inline constexpr double usual_effort = 1.0;
#endif

/// How often a random test repeats: `count` times ANYFLASH_TEST_EXAMPLES, by default 1; of that a tenth under a
/// sanitizer.
inline int repeats(int count) {
  const char* text = std::getenv("ANYFLASH_TEST_EXAMPLES");
  return std::max(1, int(std::ceil(count * usual_effort * (text ? std::atof(text) : 1))));
}

/// A test's own seed, plus ANYFLASH_TEST_SEED.
inline unsigned seed_of(unsigned own) {
  const char* text = std::getenv("ANYFLASH_TEST_SEED");
  return own + (text ? unsigned(std::strtoul(text, nullptr, 10)) : 0);
}

}  // namespace anyflash::testing
