// The CPU backend: the functions that its entry in backends.cpp points to.
#pragma once

#include <cstdint>
#include <vector>

#include "backends.h"

namespace anyflash::cpu {

std::vector<DeviceInfo> devices();
TileMenu tile_menu(const Problem& problem);

std::int64_t workspace(const Problem& problem, const ExecutionPlan& plan);
/// A forward call's memory belongs to the calling thread, which keeps it for its next call; a backward call's is freed.
Workspace allocate_workspace(const Problem& problem, const ExecutionPlan& plan);

/// `workspace` holds workspace(problem, plan) bytes, aligned to vectors.
void forward(const Problem& problem, const ExecutionPlan& plan, char* workspace);
void backward(const Problem& problem, const ExecutionPlan& plan, char* workspace);

/// Joins two results over different keys, in place.
void join(const JoinProblem& problem);

/// Sets every element of a floating-point tensor to `value`; for 16-bit types `value` must be 0.
void fill(const Problem& problem, const TensorView& view, double value);

// The workspace in bytes of the same two, which compute nothing here.
std::int64_t forward_workspace(const Problem& problem, const ExecutionPlan& plan);
std::int64_t backward_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Applies ANYFLASH_ISA; called before any kernel. Throws Error if it names no instruction set that runs here.
void choose_instruction_set();

/// Whether kernels for AVX3 multiply bfloat16 in the tiles of AMX.
bool tiles_in_use();

}  // namespace anyflash::cpu
