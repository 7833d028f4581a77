// Tells a caller who asked for it that a chunk of a call is done.
#pragma once

#include <cstdint>

#include "problem/problem.h"

namespace anyflash::cpu {

class Progress {
 public:
  Progress(const Problem& problem, std::int64_t total) : problem_(problem), total_(total) {}

  /// Called outside parallel regions where the caller listens.
  void done_one() {
    if (problem_.after_chunk) (*problem_.after_chunk)(++done_, total_);
  }

 private:
  const Problem& problem_;
  const std::int64_t total_;
  std::int64_t done_ = 0;
};

}  // namespace anyflash::cpu
