// The progress of long work, on stderr, shown only on a terminal.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

namespace anyflash::cli {

class Progress {
 public:
  explicit Progress(int total, bool quiet = false) : total_(total), shown_(!quiet && isatty(STDERR_FILENO) != 0) {}
  ~Progress() { clear(); }
  /// Announces a step.
  void step(const std::string& what) {
    if (shown_) std::fprintf(stderr, "\r\033[K%s (%d of %d)", what.c_str(), ++begun_, total_);
  }
  void clear() {
    if (shown_) std::fprintf(stderr, "\r\033[K");
  }

 private:
  int total_, begun_ = 0;
  bool shown_;
};

}  // namespace anyflash::cli
