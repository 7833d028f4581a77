#include "backends.h"

#include <string>

#include "cpu/backend.h"
#if defined(ANYFLASH_HAS_CUDA)
#include "cuda/backend.h"
#endif

namespace anyflash {
namespace {

constexpr Backend backends[] = {
    {DeviceKind::cpu, cpu::devices, cpu::tile_menu, cpu::workspace, cpu::allocate_workspace, cpu::forward,
     cpu::backward, cpu::fill, [](Device, void*) {}},
#if defined(ANYFLASH_HAS_CUDA)
    {DeviceKind::cuda, cuda::devices, cuda::tile_menu, cuda::workspace, cuda::allocate_workspace, cuda::forward,
     cuda::backward, cuda::fill, cuda::synchronize},
#endif
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

void synchronize(Device device, void* stream) { backend_of(device).synchronize(device, stream); }

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> all;
  for (const auto& backend : backends) {
    for (auto& device : backend.devices()) all.push_back(std::move(device));
  }
  return all;
}

}  // namespace anyflash
