#include "plan/threads.h"

#include <dlfcn.h>
#include <omp.h>
#include <pthread.h>

#include <algorithm>

#include "plan/cache.h"

namespace anyflash::planning {
namespace {

/// omp_pause_resource_all of the run-time whose threads this library has. It is looked up, not linked: the run-times of
/// GCC 8 and before lack it, and PyTorch up to 2.6 brings one of them along, which is this library's too where PyTorch
/// was loaded first. Another run-time in the process may have it then, and its threads are others.
auto find_pause_all() {
  const auto found = dlsym(RTLD_DEFAULT, "omp_pause_resource_all");
  Dl_info its, ours;
  const bool same = found && dladdr(found, &its) && dladdr(reinterpret_cast<void*>(&omp_get_max_threads), &ours) &&
                    its.dli_fbase == ours.dli_fbase;
  return reinterpret_cast<int (*)(omp_pause_resource_t)>(same ? found : nullptr);
}
const auto pause_all = find_pause_all();

// A child that is forked has the thread that forked and OpenMP's record of its team, but not the team: GCC's run-time
// would wait for it for ever. So the team is let go before a fork; parent and child each start a new one at need. Where
// it cannot be let go, the child computes with one thread. And the cache's lock is taken before the fork. Else another
// thread might hold it then, and the child, which lacks that thread, could never take it.
void before_fork() {
  if (pause_all) pause_all(omp_pause_soft);
  plan_cache().lock();
}
void after_fork() { plan_cache().unlock(); }
void after_fork_in_child() {
  plan_cache().unlock();
  if (!pause_all) omp_set_max_active_levels(0);
}
[[maybe_unused]] const int registered = pthread_atfork(before_fork, after_fork, after_fork_in_child);

}  // namespace

int plan_threads(int asked) {
  // To count the processors is a system call, which a tiny call feels.
  thread_local const int most = std::max(omp_get_num_procs(), 64);
  return std::min(asked > 0 ? asked : omp_get_max_threads(), most);
}

}  // namespace anyflash::planning
