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

/// A bar of a pass's chunks.
class ChunkProgress {
 public:
  explicit ChunkProgress(bool quiet) : shown_(!quiet && isatty(STDERR_FILENO) != 0) {}
  ~ChunkProgress() { clear(); }
  void begin(const char* pass) { pass_ = pass; }
  void show(long long done, long long total) {
    constexpr int width = 40;
    if (!shown_ || total < 1) return;
    const std::string bar(static_cast<std::size_t>(width * done / total), '#');
    std::fprintf(stderr, "\r\033[K%-8s [%-*s] %lld of %lld chunks", pass_, width, bar.c_str(), done, total);
  }
  void clear() {
    if (shown_) std::fprintf(stderr, "\r\033[K");
  }

 private:
  bool shown_;
  const char* pass_ = "";
};

}  // namespace anyflash::cli
