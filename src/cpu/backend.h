// The CPU backend: runs a Plan on a Problem's pointers.
#pragma once

#include <vector>

#include "plan/plan.h"
#include "problem/problem.h"

namespace anyflash::cpu {

/// The boxes the kernels take.
TileMenu tile_menu(const Problem& problem);

void forward(const Problem& problem, const ExecutionPlan& plan);
void backward(const Problem& problem, const ExecutionPlan& plan);

/// The instruction set the kernels will use on this machine, e.g. "AVX3_ZEN4", and all that were compiled in and run
/// here. ANYFLASH_ISA=AVX2 (or another name of the list) restricts it, for tests.
const char* instruction_set();
std::vector<const char*> instruction_sets();

/// Makes ANYFLASH_ISA hold; called before any kernel. Throws Error if it names nothing that runs here.
void choose_instruction_set();

}  // namespace anyflash::cpu
