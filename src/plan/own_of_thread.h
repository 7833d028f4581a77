// What a thread keeps between its calls.
#pragma once

namespace anyflash {

/// The calling thread's own T, one for each T, which it keeps until it ends. From then on null: calls may still come
/// while a thread or the process ends.
template <class T>
T* own_of_thread() {
  thread_local bool ended = false;  // can be read to the last: nothing of it is destroyed
  struct Own {
    T value{};
    ~Own() { ended = true; }
  };
  if (ended) return nullptr;
  thread_local Own own;
  return &own.value;
}

}  // namespace anyflash
