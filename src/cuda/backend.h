// The CUDA backend: what its entry in backends.cpp points to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends.h"

namespace anyflash::cuda {

std::vector<DeviceInfo> devices();
TileMenu tile_menu(const Problem& problem);

/// Beside the call's tensors: masks that are no part of a kept plan, words, the page table, and what the kernels work
/// in. Unless the caller gives it, it is taken inside the call, in the order of its stream, so there is nothing to
/// allocate before: allocate_workspace gives null.
std::int64_t workspace(const Problem& problem, const ExecutionPlan& plan);
Workspace allocate_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Both queue their work on the problem's stream and return.
void forward(const Problem& problem, const ExecutionPlan& plan, char* workspace);
void backward(const Problem& problem, const ExecutionPlan& plan, char* workspace);

/// Throws Error if a pointer, which it names, is known to point elsewhere than into the device's memory.
void check_memory(const char* name, const void* data, Device device);

/// Every element of a floating-point tensor becomes `value`, in the order of the problem's stream. 16-bit ones: 0
/// alone.
void fill(const Problem& problem, const TensorView& view, double value);

void synchronize(Device device, void* stream);
void synchronize_device(Device device);

std::shared_ptr<void> memory(Device device, std::size_t bytes);
void copy(void* to, const void* from, std::size_t bytes, Device device);

}  // namespace anyflash::cuda
