// Backends behind one interface: what a call asks of the device that its tensors are on. A backend has a folder of its
// own and an entry in the table (backends.cpp); it sees a Problem, a Plan and pointers.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <anyflash/devices.h>

#include "plan/plan.h"
#include "problem/problem.h"

namespace anyflash {

/// Memory of a device, with what gives it back.
using Workspace = std::unique_ptr<char, void (*)(char*)>;

struct Backend {
  DeviceKind kind;
  std::vector<DeviceInfo> (*devices)();  ///< those of this machine that it can use, in the order of their index
  TileMenu (*menu)(const Problem&);      ///< the boxes its kernels take
  /// Bytes that a call works in, beside its tensors and the plan, given the gradients it is to compute.
  std::int64_t (*workspace)(const Problem&, const ExecutionPlan&);
  Workspace (*allocate)(const Problem&, const ExecutionPlan&);  ///< that workspace; throws Error if there is no memory
  void (*forward)(const Problem&, const ExecutionPlan&, char* workspace);
  void (*backward)(const Problem&, const ExecutionPlan&, char* workspace);
  /// Throws Error unless the data of a tensor, which it names, is in the device's memory, as far as that can be told.
  void (*check)(const char* name, const void* data, Device);
  void (*fill)(const Problem&, const TensorView&, double value);  ///< a result that needs no arithmetic; of 16 bits: 0
  void (*synchronize)(Device, void* stream);                      ///< waits for what was queued
  void (*synchronize_device)(Device);                             ///< on any stream
  std::shared_ptr<void> (*memory)(Device, std::size_t bytes);     ///< what device_memory gives
  void (*copy)(void* to, const void* from, std::size_t bytes, Device);
};

/// The backend of the device that the query is on. Throws Error if there is none.
const Backend& backend_of(Device device);

/// What a call will work in, in bytes; 0 where there is nothing to compute.
std::int64_t workspace_bytes(const Problem& problem, const ExecutionPlan& plan);

}  // namespace anyflash
