// Backends behind one interface: what a call asks of the device that its tensors are on. A backend has its own folder
// and an entry in the table (backends.cpp). It sees a Problem, a Plan and pointers.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <anyflash/devices.h>

#include "plan/plan.h"
#include "problem/problem.h"

namespace anyflash {

struct JoinProblem;

/// Device memory, with the function that frees it.
using Workspace = std::unique_ptr<char, void (*)(char*)>;

struct Backend {
  DeviceKind kind;
  std::vector<DeviceInfo> (*devices)();  ///< the usable devices of this machine, by index
  TileMenu (*menu)(const Problem&);      ///< the block shapes that its kernels accept
  /// Bytes of workspace of a call, given the gradients that it is to compute.
  std::int64_t (*workspace)(const Problem&, const ExecutionPlan&);
  Workspace (*allocate)(const Problem&, const ExecutionPlan&);  ///< that workspace; throws Error if there is no memory
  void (*forward)(const Problem&, const ExecutionPlan&, char* workspace);
  void (*backward)(const Problem&, const ExecutionPlan&, char* workspace);
  void (*join)(const JoinProblem&);  ///< of two results over different keys
  /// Throws Error, naming the tensor, unless its data is in the device's memory, as far as that can be told.
  void (*check)(const char* name, const void* data, Device);
  void (*fill)(const Problem&, const TensorView&, double value);  ///< a result without arithmetic; 16-bit types: 0
  void (*synchronize)(Device, void* stream);                      ///< waits for queued work
  void (*synchronize_device)(Device);                             ///< on all streams
  std::shared_ptr<void> (*memory)(Device, std::size_t bytes);     ///< for device_memory
  void (*copy)(void* to, const void* from, std::size_t bytes, Device);
};

/// The backend of the query's device. Throws Error if there is none.
const Backend& backend_of(Device device);

/// Bytes of workspace of a call; 0 where there is nothing to compute.
std::int64_t workspace_bytes(const Problem& problem, const ExecutionPlan& plan);

}  // namespace anyflash
