// Tells a caller who asked for it that a chunk of a call is done.
#pragma once

#include <cstdint>

#include "problem/problem.h"

namespace anyflash::cpu {

class Progress {
 public:
  Progress(const Problem& problem, std::int64_t total) : problem_(problem), total_(total) {}

  /// Called outside parallel regions where the caller listens. A chunk without work is counted, and not told unless it
  /// is the last.
  void done_one(bool worked = true) {
    ++done_;
    if (worked || done_ == total_) tell();
  }
  /// Whether the caller listens. It gives back pages, so work on more than a chunk tells it how far the call is.
  bool listened() const { return problem_.after_chunk != nullptr; }
  void tell() {
    if (listened()) (*problem_.after_chunk)(done_, total_);
  }

 private:
  const Problem& problem_;
  const std::int64_t total_;
  std::int64_t done_ = 0;
};

}  // namespace anyflash::cpu
