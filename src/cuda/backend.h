// The CUDA backend: the functions that its entry in backends.cpp points to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "backends.h"

namespace anyflash::cuda {

std::vector<DeviceInfo> devices();
TileMenu tile_menu(const Problem& problem);

/// Bytes that a call needs apart from its tensors: masks that are not part of a kept plan, mask words, the page table,
/// the kernels' workspace. Unless the caller passes this memory, it is allocated inside the call, in stream order. So
/// allocate_workspace returns null.
std::int64_t workspace(const Problem& problem, const ExecutionPlan& plan);
Workspace allocate_workspace(const Problem& problem, const ExecutionPlan& plan);

/// Both queue their work on the problem's stream and return.
void forward(const Problem& problem, const ExecutionPlan& plan, char* workspace);
void backward(const Problem& problem, const ExecutionPlan& plan, char* workspace);

/// The same, some groups (batch entry, key/value head) after the other in one workspace, if problem.chunks says so.
void forward_in_groups(const Problem& problem, const ExecutionPlan& plan, char* workspace);
void backward_in_groups(const Problem& problem, const ExecutionPlan& plan, char* workspace);

/// Joins two results over different keys, in place and in the order of the problem's stream.
void join(const JoinProblem& problem);

/// Throws Error, naming the pointer, if it is known not to point into the device's memory.
void check_memory(const char* name, const void* data, Device device);

/// Sets every element of a floating-point tensor to `value`, in the order of the problem's stream. For 16-bit types
/// `value` must be 0.
void fill(const Problem& problem, const TensorView& view, double value);

void synchronize(Device device, void* stream);
void synchronize_device(Device device);

std::shared_ptr<void> memory(Device device, std::size_t bytes);
void copy(void* to, const void* from, std::size_t bytes, Device device);

}  // namespace anyflash::cuda
