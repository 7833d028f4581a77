// Threads are OpenMP's. The number of threads that a plan is made for.
#pragma once

namespace anyflash::planning {

/// asked: 0 for as many as OpenMP gives. Results do not depend on it. Never more than the machine can use.
int plan_threads(int asked);

}  // namespace anyflash::planning
