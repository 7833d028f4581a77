// The tile machine's backend: the functions that its entry in backends.cpp points to.
#pragma once

#include <vector>

#include "backends.h"

namespace anyflash::simulator {

std::vector<DeviceInfo> devices();
/// Throws Error for what the machine does not offer.
TileMenu tile_menu(const Problem& problem);
void forward(const Problem& problem, const ExecutionPlan& plan, char* workspace);
void backward(const Problem& problem, const ExecutionPlan& plan, char* workspace);

}  // namespace anyflash::simulator
