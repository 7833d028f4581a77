#include "plan/threads.h"

#include <omp.h>
#include <pthread.h>

#include <algorithm>

namespace anyflash::planning {
namespace {

// A child that is forked has the thread that forked and OpenMP's record of its team, but not the team: GCC's run-time
// would wait for it for ever. So the team is let go before a fork; parent and child each start a new one at need.
[[maybe_unused]] const int let_go =
    pthread_atfork([] { omp_pause_resource_all(omp_pause_soft); }, nullptr, nullptr);

}  // namespace

int plan_threads(int asked) {
  return std::min(asked > 0 ? asked : omp_get_max_threads(), std::max(omp_get_num_procs(), 64));
}

}  // namespace anyflash::planning
