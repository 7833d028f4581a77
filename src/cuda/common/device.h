// What there is to know about a GPU, asked once; and the GPU that a thread's calls of the runtime go to.
#pragma once

#include <anyflash/tensor.h>
#include <cuda_runtime_api.h>

#include <string>

namespace anyflash::cuda {

inline constexpr int most_devices = 64;  ///< of one machine

struct DeviceFacts {
  std::string model;
  int major = 0, minor = 0;  ///< compute capability
  int multiprocessors = 0;
  int shared_bytes = 0;           ///< most that a block of threads may have
  bool reads_host_pages = false;  ///< any of the CPU's memory, as the CPU does
};

/// The number of GPUs; 0 where there is no driver.
int device_count();

/// Throws Error if there is no such GPU, or none that the kernels run on.
const DeviceFacts& facts_of(Device device);

/// Throws Error if the kernels do not run on such a GPU.
void check_supported(Device device, const DeviceFacts& facts);

/// Is it a Hopper, and are Hopper's own kernels built?
bool has_groups(Device device);

/// Makes a GPU the calling thread's, until the end of its scope.
class DeviceScope {
 public:
  explicit DeviceScope(int index);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  bool other_ = false;  // than the thread's own
};

/// Throws Error unless `data` points to memory of the GPU: "key: in host memory, expected memory of cuda:0".
void check_pointer(const char* name, const void* data, Device device);

}  // namespace anyflash::cuda
