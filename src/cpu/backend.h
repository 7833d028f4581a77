// The CPU backend: what its entry in backends.cpp points to.
#pragma once

#include <cstdint>
#include <vector>

#include "backends.h"

namespace anyflash::cpu {

std::vector<DeviceInfo> devices();
TileMenu tile_menu(const Problem& problem);

std::int64_t workspace(const Problem& problem, const ExecutionPlan& plan);
/// A forward call's memory is the calling thread's own, kept for its next call; backward's is given back.
Workspace allocate_workspace(const Problem& problem, const ExecutionPlan& plan);

/// `workspace` holds workspace(problem, plan) bytes, aligned to vectors.
void forward(const Problem& problem, const ExecutionPlan& plan, char* workspace);
void backward(const Problem& problem, const ExecutionPlan& plan, char* workspace);

/// Every element of a floating-point tensor becomes `value`; 16-bit ones: 0 alone.
void fill(const Problem& problem, const TensorView& view, double value);

// The same two without memory: they compute nothing and return the bytes they would take.
std::int64_t forward_workspace(const Problem& problem, const ExecutionPlan& plan);
std::int64_t backward_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Makes ANYFLASH_ISA hold; called before any kernel. Throws Error if it names nothing that runs here.
void choose_instruction_set();

/// Whether kernels for AVX3 multiply bfloat16 in the tiles of AMX.
bool tiles_in_use();

}  // namespace anyflash::cpu
