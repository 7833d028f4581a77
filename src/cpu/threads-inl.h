// Work divided among threads. A single thread enters no parallel region: OpenMP would create and free a team for it,
// which takes a tenth of a small call's time.

#include <cstdint>

#include <omp.h>

#include "hwy/highway.h"

#if defined(ANYFLASH_CPU_THREADS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ANYFLASH_CPU_THREADS_INL_H_
#undef ANYFLASH_CPU_THREADS_INL_H_
#else
#define ANYFLASH_CPU_THREADS_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace anyflash::cpu {
namespace HWY_NAMESPACE {

/// Runs body(thread) once on each of at most `threads` threads.
template <class Body>
void OnThreads(int threads, const Body& body) {
  if (threads <= 1) return body(0);
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num());
}

/// Runs body(index, thread) for index 0 .. count - 1, handed out in ascending order.
template <class Body>
void ForEach(std::int64_t count, int threads, const Body& body) {
  if (threads <= 1) {
    for (std::int64_t i = 0; i < count; ++i) body(i, 0);
    return;
  }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (std::int64_t i = 0; i < count; ++i) body(i, omp_get_thread_num());
}

}  // namespace HWY_NAMESPACE
}  // namespace anyflash::cpu
HWY_AFTER_NAMESPACE();

#endif  // ANYFLASH_CPU_THREADS_INL_H_
