#include "cuda/common/device.h"

#include <cuda.h>

#include <array>
#include <atomic>
#include <mutex>

#include "cuda/common/driver.h"
#include "cuda/common/errors.h"

namespace anyflash::cuda {
namespace {

DeviceFacts ask(int index) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, index), "asking for a device's properties");
  return {properties.name,
          properties.major,
          properties.minor,
          properties.multiProcessorCount,
          static_cast<int>(properties.sharedMemPerBlockOptin),
          properties.pageableMemoryAccessUsesHostPageTables != 0};
}

/// Makes a GPU the thread's current one and restores the previous one. cudaSetDevice does not serve: restoring with it
/// creates a context on a GPU that the process may not use.
struct ContextFunctions {
  decltype(&cuDevicePrimaryCtxRetain) retain = driver_function<decltype(retain)>("cuDevicePrimaryCtxRetain");
  decltype(&cuCtxPushCurrent) push = driver_function<decltype(push)>("cuCtxPushCurrent");
  decltype(&cuCtxPopCurrent) pop = driver_function<decltype(pop)>("cuCtxPopCurrent");
};

const ContextFunctions& context_functions() {
  static const ContextFunctions functions;
  return functions;
}

/// Makes the runtime's context on a GPU the thread's current context.
void push_context(int index) {
  static std::array<std::once_flag, most_devices> asked;
  static std::array<CUcontext, most_devices> contexts;  // never released, as in the runtime
  const auto& [retain, push, pop] = context_functions();
  const auto must = [&](bool worked) {
    if (!worked)
      throw Error(Error::Kind::device, "cuda: choosing " + device_name({DeviceKind::cuda, index}) + " failed");
  };
  must(retain && push && pop);
  // If this throws, the next call tries again.
  std::call_once(asked[index], [&, &retain = retain] { must(retain(&contexts[index], index) == CUDA_SUCCESS); });
  must(push(contexts[index]) == CUDA_SUCCESS);
}

cudaError_t count_devices(int& count) {
  const auto status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) cudaGetLastError(), count = 0;
  return status;
}

/// The reason why CUDA finds no GPU.
std::string no_gpu() {
  constexpr int oldest = CUDART_VERSION / 1000;
  int version = 0;  // stays 0 without a driver
  if (cudaDriverGetVersion(&version) != cudaSuccess) cudaGetLastError();
  if (version != 0 && version / 1000 < oldest) {
    return "but the driver is for CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10) +
           ", expected " + std::to_string(oldest) + ".0 or newer";
  }
  int count;
  const auto status = count_devices(count);
  const bool none = status == cudaSuccess || status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver;
  return "but CUDA finds no GPU here" + (none ? "" : std::string(": ") + cudaGetErrorString(status));
}

}  // namespace

int device_count() {
  int count;
  count_devices(count);
  return count < most_devices ? count : most_devices;
}

const DeviceFacts& facts_of(Device device) {
  static std::array<std::atomic<bool>, most_devices> serves;  // a call asks for the facts a dozen times
  static std::array<std::once_flag, most_devices> asked;
  static auto& facts = *new std::array<DeviceFacts, most_devices>;  // never destroyed: calls may still come at exit
  static std::atomic<int> known = 0;                                // asked again while 0: a driver may come later
  if (device.index >= 0 && device.index < most_devices && serves[device.index].load(std::memory_order_acquire))
    return facts[device.index];
  int count = known.load(std::memory_order_relaxed);
  if (count == 0) known = count = device_count();
  if (count == 0) throw Error(Error::Kind::device, "query: on " + device_name(device) + ", " + no_gpu());
  if (device.index < 0 || device.index >= count) {
    throw Error(Error::Kind::device, "query: on " + device_name(device) + ", expected cuda:0" +
                                         (count > 1 ? " to cuda:" + std::to_string(count - 1) : ""));
  }
  std::call_once(asked[device.index], [&] { facts[device.index] = ask(device.index); });
  check_supported(device, facts[device.index]);
  serves[device.index].store(true, std::memory_order_release);
  return facts[device.index];
}

void check_supported(Device device, const DeviceFacts& facts) {
  if (facts.major * 10 + facts.minor >= 75) return;
  throw Error(Error::Kind::unsupported, device_name(device) + ": " + facts.model + " of compute capability " +
                                            std::to_string(facts.major) + "." + std::to_string(facts.minor) +
                                            ", expected 7.5 or newer");
}

bool has_groups([[maybe_unused]] Device device) {
#if defined(ANYFLASH_CUDA_HAS_GROUPS) && !defined(ANYFLASH_CUDA_SMALL_TILES)
  return facts_of(device).major == 9;
#else
  return false;
#endif
}

DeviceScope::DeviceScope(int index) {
  int current = 0;
  check(cudaGetDevice(&current), "asking for the current device");
  if (current == index) return;
  push_context(index);
  other_ = true;
}

DeviceScope::~DeviceScope() {
  CUcontext context;
  if (other_) context_functions().pop(&context);
}

void check_pointer(const char* name, const void* data, Device device) {
  if (!data) return;
  cudaPointerAttributes attributes;
  check(cudaPointerGetAttributes(&attributes, data), "looking at a pointer");
  const auto fail = [&](const std::string& where) {
    throw Error(Error::Kind::device,
                std::string(name) + ": in " + where + ", expected memory of " + device_name(device));
  };
  if (attributes.type == cudaMemoryTypeUnregistered || attributes.type == cudaMemoryTypeHost) fail("host memory");
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device.index)
    fail("memory of " + device_name({DeviceKind::cuda, attributes.device}));
}

}  // namespace anyflash::cuda
