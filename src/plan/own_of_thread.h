// Objects that a thread keeps between its calls.
#pragma once

namespace anyflash {

/// The calling thread's own T, one for each T, kept until the thread ends. After that null: calls may still come while
/// a thread or the process ends.
template <class T>
T* own_of_thread() {
  thread_local bool ended = false;  // readable to the last: it has no destructor
  struct Own {
    T value{};
    ~Own() { ended = true; }
  };
  if (ended) return nullptr;
  thread_local Own own;
  return &own.value;
}

}  // namespace anyflash
