// Threads are OpenMP's. How many a plan is made for.
#pragma once

namespace anyflash::planning {

/// asked: 0 for all that OpenMP gives. Results do not depend on it; more than the machine has use for are not taken.
int plan_threads(int asked);

}  // namespace anyflash::planning
