#include "backends.h"

#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "cpu/backend.h"
#if defined(ANYFLASH_HAS_CUDA)
#include "cuda/backend.h"
#endif
#include "tile_machine/backend.h"

namespace anyflash {
namespace {

std::shared_ptr<void> cpu_memory(Device, std::size_t bytes) {
  constexpr auto most = std::size_t{std::numeric_limits<std::ptrdiff_t>::max() / 2};  // the control block is added
  try {
    if (bytes <= most) return std::make_shared<std::byte[]>(bytes > 0 ? bytes : 1);
  } catch (const std::bad_alloc&) {
  }
  throw Error(Error::Kind::memory, "cpu: not enough memory for " + std::to_string(bytes) + " bytes");
}

constexpr Backend backends[] = {
    {DeviceKind::cpu, cpu::devices, cpu::tile_menu, cpu::workspace, cpu::allocate_workspace, cpu::forward,
     cpu::backward, cpu::join, [](const char*, const void*, Device) {}, cpu::fill, [](Device, void*) {}, [](Device) {},
     cpu_memory, [](void* to, const void* from, std::size_t bytes, Device) { std::memcpy(to, from, bytes); }},
#if defined(ANYFLASH_HAS_CUDA)
    {DeviceKind::cuda, cuda::devices, cuda::tile_menu, cuda::workspace, cuda::allocate_workspace,
     cuda::forward_in_groups, cuda::backward_in_groups, cuda::join, cuda::check_memory, cuda::fill, cuda::synchronize,
     cuda::synchronize_device, cuda::memory, cuda::copy},
#endif
    // Simulated: not a device of this machine.
    {DeviceKind::tiles, [] { return std::vector<DeviceInfo>(); }, simulator::tile_menu,
     [](const Problem&, const ExecutionPlan&) { return std::int64_t{0}; },
     [](const Problem&, const ExecutionPlan&) { return Workspace(nullptr, [](char*) {}); }, simulator::forward,
     simulator::backward, cpu::join, [](const char*, const void*, Device) {}, cpu::fill, [](Device, void*) {},
     [](Device) {}, cpu_memory,
     [](void* to, const void* from, std::size_t bytes, Device) { std::memcpy(to, from, bytes); }},
};

}  // namespace

const Backend& backend_of(Device device) {
  for (const auto& backend : backends) {
    if (backend.kind == device.kind) return backend;
  }
  throw Error(Error::Kind::device,
              "query: on " + device_name(device) + ", expected cpu, the only device of this build");
}

std::int64_t workspace_bytes(const Problem& problem, const ExecutionPlan& plan) {
  return problem.has_pairs() ? backend_of(problem.device).workspace(problem, plan) : 0;
}

std::shared_ptr<void> device_memory(Device device, std::size_t bytes) {
  return backend_of(device).memory(device, bytes);
}

void copy_memory(void* to, const void* from, std::size_t bytes, Device device) {
  if (bytes > 0) backend_of(device).copy(to, from, bytes, device);
}

void synchronize(Device device, void* stream) { backend_of(device).synchronize(device, stream); }
void synchronize_device(Device device) { backend_of(device).synchronize_device(device); }

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> all;
  for (const auto& backend : backends) {
    for (auto& device : backend.devices()) all.push_back(std::move(device));
  }
  return all;
}

}  // namespace anyflash
