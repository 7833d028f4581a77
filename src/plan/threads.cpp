#include "plan/threads.h"

#include <omp.h>
#include <pthread.h>

#include <algorithm>

#include "plan/cache.h"

namespace anyflash::planning {
namespace {

// A child that is forked has the thread that forked and OpenMP's record of its team, but not the team: GCC's run-time
// would wait for it for ever. So the team is let go before a fork; parent and child each start a new one at need. And
// the cache is held, lest the child be born with it locked by a thread that it lacks.
void before_fork() {
  omp_pause_resource_all(omp_pause_soft);
  plan_cache().lock();
}
void after_fork() { plan_cache().unlock(); }
[[maybe_unused]] const int registered = pthread_atfork(before_fork, after_fork, after_fork);

}  // namespace

int plan_threads(int asked) {
  return std::min(asked > 0 ? asked : omp_get_max_threads(), std::max(omp_get_num_procs(), 64));
}

}  // namespace anyflash::planning
