#include "cuda/common/device.h"

#include <array>
#include <mutex>

#include "cuda/common/errors.h"

namespace anyflash::cuda {
namespace {

DeviceFacts ask(int index) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, index), "asking for a device's properties");
  return {properties.name, properties.major, properties.minor, properties.multiProcessorCount,
          static_cast<int>(properties.sharedMemPerBlockOptin)};
}

}  // namespace

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count < most_devices ? count : most_devices;
}

const DeviceFacts& facts_of(Device device) {
  static std::array<std::once_flag, most_devices> asked;
  static std::array<DeviceFacts, most_devices> facts;
  static const int count = device_count();
  if (count == 0) throw Error(Error::Kind::device, "query: on " + device_name(device) + ", but CUDA finds no GPU here");
  if (device.index < 0 || device.index >= count) {
    throw Error(Error::Kind::device, "query: on " + device_name(device) + ", expected cuda:0" +
                                         (count > 1 ? " to cuda:" + std::to_string(count - 1) : ""));
  }
  std::call_once(asked[device.index], [&] { facts[device.index] = ask(device.index); });
  const auto& found = facts[device.index];
  if (found.major * 10 + found.minor < 75) {
    throw Error(Error::Kind::unsupported, device_name(device) + ": " + found.model + " of compute capability " +
                                              std::to_string(found.major) + "." + std::to_string(found.minor) +
                                              ", expected 7.5 or newer");
  }
  return found;
}

DeviceScope::DeviceScope(int index) {
  int current = 0;
  check(cudaGetDevice(&current), "asking for the current device");
  if (current == index) return;
  check(cudaSetDevice(index), "choosing a device");
  before_ = current;
}

DeviceScope::~DeviceScope() {
  if (before_ >= 0) cudaSetDevice(before_);
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
