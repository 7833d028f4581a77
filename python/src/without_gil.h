// Work during which other Python threads may run.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace anyflash::python {

/// Releases Python's lock (the GIL) while it lives. If the interpreter ends meanwhile, Python before 3.14 unwinds a
/// thread that asks for the lock again, which destructors do not survive. As in newer versions, that thread then
/// sleeps.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace anyflash::python
