#include "cuda/backend.h"

#include <algorithm>

#include "cuda/common/device.h"
#include "cuda/common/device_plan.h"
#include "cuda/common/errors.h"
#include "cuda/common/memory.h"
#include "cuda/common/memory_parts.h"
#include "cuda/portable/backward.h"
#include "cuda/portable/decode.h"
#include "cuda/portable/forward.h"
#include "cuda/portable/launch.h"
#include "plan/parts.h"

namespace anyflash::cuda {

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> found;
  for (int i = 0; i < device_count(); ++i) {
    const Device device{DeviceKind::cuda, i};
    try {
      found.push_back({device, facts_of(device).model, 0});
    } catch (const Error&) {  // a GPU that the kernels do not run on
    }
  }
  return found;
}

TileMenu tile_menu(const Problem& problem) {
  facts_of(problem.device);  // throws Error early if there is no such GPU
  return problem.direction == Direction::forward ? forward_menu(problem) : backward_menu(problem);
}

namespace {

std::int64_t workspace_of_part(const Problem& problem, const ExecutionPlan& plan) {
  const auto pages = problem.pages.page_size > 0 && !problem.tables_on_device
                         ? problem.batch * (problem.keys() / problem.pages.page_size) * 4
                         : 0;
  // What depends on sizes and options only: a plan's calls may have tensors that lie otherwise in memory.
  std::int64_t own = 0;
  if (problem.direction == Direction::backward) {
    own = backward_workspace(problem, plan);
  } else {
    const bool decodes = decode_may_serve(problem, plan);
    if (decodes) own = decode_workspace(problem, plan);
    if (!decodes || !has_few_rows(problem)) own = std::max(own, forward_workspace(problem, plan));
  }
  MemoryParts parts(nullptr);
  for (const auto bytes : {own, pages, static_cast<std::int64_t>(device_bytes(problem, plan))}) parts.take<char>(bytes);
  return parts.bytes();
}

}  // namespace

std::int64_t workspace(const Problem& problem, const ExecutionPlan& plan) {
  std::int64_t most = -1;
  // With one mask for all, the first part needs most. Room for masks found on the device is not so regular.
  const bool alike = !plan.masks_on_device && plan.groups.size() == 1;
  planning::for_each_part(problem, plan, [&](const Problem& part, const ExecutionPlan& of_part) {
    // The keys of fewer heads are split more often.
    const bool splits = part.direction == Direction::forward && !part.deterministic &&
                        (element_size(part.type) == 2 || decode_may_serve(part, of_part));
    if (most < 0 || !alike || splits) most = std::max(most, workspace_of_part(part, of_part));
  });
  return most;
}

namespace {

/// Runs a call part by part. All memory is allocated before the first part: no later one can fail for want of it, with
/// earlier results already written.
void run_in_groups(const Problem& problem, const ExecutionPlan& plan, char* given,
                   void (*run)(const Problem&, const ExecutionPlan&, char*)) {
  if (problem.chunks.groups <= 0) return run(problem, plan, given);
  const DeviceScope scope(problem.device.index);
  check_pointers(problem);
  const auto bytes = given ? 0 : workspace(problem, plan);
  const StreamMemory own(static_cast<std::size_t>(bytes), static_cast<cudaStream_t>(problem.stream));
  planning::for_each_part(problem, plan, [&](const Problem& part, const ExecutionPlan& of_part) {
    run(part, of_part, given ? given : own.get());
  });
}

}  // namespace

void forward_in_groups(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  run_in_groups(problem, plan, workspace, forward);
}

void backward_in_groups(const Problem& problem, const ExecutionPlan& plan, char* workspace) {
  run_in_groups(problem, plan, workspace, backward);
}

Workspace allocate_workspace(const Problem&, const ExecutionPlan&) {
  return {nullptr, [](char*) {}};
}

void check_memory(const char* name, const void* data, Device device) {
  facts_of(device);
  const DeviceScope scope(device.index);
  check_pointer(name, data, device);
}

void synchronize(Device device, void* stream) {
  facts_of(device);
  const DeviceScope scope(device.index);
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "waiting for a stream");
}

void synchronize_device(Device device) {
  facts_of(device);
  const DeviceScope scope(device.index);
  check(cudaDeviceSynchronize(), "waiting for a device");
}

std::shared_ptr<void> memory(Device device, std::size_t bytes) {
  facts_of(device);
  const DeviceScope scope(device.index);
  void* data = nullptr;
  if (const auto status = cudaMalloc(&data, bytes > 0 ? bytes : 1); status != cudaSuccess) {
    cudaGetLastError();
    if (status != cudaErrorMemoryAllocation) check(status, "allocating device memory");
    throw Error(Error::Kind::memory,
                device_name(device) + ": not enough memory for " + std::to_string(bytes) + " bytes");
  }
  return {data, [device](void* given) {
            try {
              const DeviceScope own(device.index);
              give_back(cudaFree(given));
            } catch (const Error&) {  // the process is ending and releases its memory anyway
            }
          }};
}

void copy(void* to, const void* from, std::size_t bytes, Device device) {
  facts_of(device);
  const DeviceScope scope(device.index);
  check(cudaDeviceSynchronize(), "waiting for a device");
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copying to or from a device");
  check(cudaStreamSynchronize(cudaStreamLegacy), "copying to or from a device");  // the copy may return earlier
}

}  // namespace anyflash::cuda
