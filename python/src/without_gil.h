// Work for which other threads of Python's need not wait.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace anyflash::python {

/// While it lives, the thread does not hold Python's lock (the GIL). Where the interpreter ends meanwhile, Python
/// before 3.14 unwinds the thread that asks for it again, which no destructor bears: as since then, that thread sleeps.
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
