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

// A forked child has the forking thread and OpenMP's record of its team, but not the team: GCC's runtime would wait for
// it forever. So the team is released before a fork; parent and child each start a new one when needed. If it cannot be
// released, the child computes with one thread. The cache's lock is also taken before the fork. Otherwise another
// thread might hold it, and the child, which lacks that thread, could never take it.
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
  // counting the processors is a system call, which matters to a tiny call
  thread_local const int most = std::max(omp_get_num_procs(), 64);
  return std::min(asked > 0 ? asked : omp_get_max_threads(), most);
}

}  // namespace anyflash::planning
