// The tile machine's backend: the functions that its entry in backends.cpp points to.
#pragma once

#include <vector>

#include "backends.h"
#include "plan/chunks.h"

namespace anyflash::simulator {

/// Throws Error for what the machine does not offer.
TileMenu tile_menu(const Problem& problem);
void forward(const Problem& problem, const ExecutionPlan& plan, char* workspace);
void backward(const Problem& problem, const ExecutionPlan& plan, char* workspace);
/// The mappings as ways to run a call, and the smallest memory_budget that works.
std::vector<planning::Candidate> ways(const Problem& problem, const ExecutionPlan& plan);
std::int64_t least_bytes(const Problem& problem, const ExecutionPlan& plan);

}  // namespace anyflash::simulator
