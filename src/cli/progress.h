// A counter on stderr for long work, shown only on a terminal.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

namespace anyflash::cli {

class Progress {
 public:
  Progress(std::string what, int total) : what_(std::move(what)), total_(total), shown_(isatty(STDERR_FILENO) != 0) {}
  ~Progress() { clear(); }
  void step() {
    if (shown_) std::fprintf(stderr, "\r%s %d of %d", what_.c_str(), ++done_, total_);
  }
  void clear() {
    if (shown_) std::fprintf(stderr, "\r\033[K");
  }

 private:
  std::string what_;
  int total_, done_ = 0;
  bool shown_;
};

}  // namespace anyflash::cli
