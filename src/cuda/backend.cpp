#include "cuda/backend.h"

#include "cuda/common/device.h"
#include "cuda/common/device_plan.h"
#include "cuda/common/errors.h"
#include "cuda/portable/forward.h"

namespace anyflash::cuda {

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> found;
  for (int i = 0; i < device_count(); ++i) {
    const Device device{DeviceKind::cuda, i};
    try {
      found.push_back({device, facts_of(device).model, 0});
    } catch (const Error&) {  // one that the kernels do not run on
    }
  }
  return found;
}

TileMenu tile_menu(const Problem& problem) { return forward_menu(problem); }

std::int64_t workspace(const Problem& problem, const ExecutionPlan& plan) {
  const auto pages = problem.pages.page_size > 0 ? problem.batch * (problem.keys() / problem.pages.page_size) * 4 : 0;
  return pages + (plan.kept ? 0 : static_cast<std::int64_t>(device_bytes(plan)));
}

Workspace allocate_workspace(const Problem&, const ExecutionPlan&) {
  return {nullptr, [](char*) {}};
}

void backward(const Problem&, const ExecutionPlan&, char*) {
  throw Error(Error::Kind::unsupported, "backward: not offered on cuda yet, expected tensors on the cpu");
}

void synchronize(Device device, void* stream) {
  facts_of(device);
  const DeviceScope scope(device.index);
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "waiting for a stream");
}

}  // namespace anyflash::cuda
