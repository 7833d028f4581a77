// Facts about a GPU, queried once, and the scope that selects a GPU for a thread's calls of the CUDA runtime.
#pragma once

#include <anyflash/tensor.h>
#include <cuda_runtime_api.h>

#include <string>

namespace anyflash::cuda {

inline constexpr int most_devices = 64;  ///< in one machine

struct DeviceFacts {
  std::string model;
  int major = 0, minor = 0;  ///< compute capability
  int multiprocessors = 0;
  int shared_bytes = 0;           ///< the most that a thread block may have
  bool reads_host_pages = false;  ///< reads all of the CPU's memory through the host's page tables
};

/// The number of GPUs; 0 where there is no driver.
int device_count();

/// Throws Error if there is no such GPU, or if the kernels do not run on it.
const DeviceFacts& facts_of(Device device);

/// Throws Error if the kernels do not run on such a GPU.
void check_supported(Device device, const DeviceFacts& facts);

/// Is it a Hopper GPU, and are the Hopper kernels built?
bool has_groups(Device device);

/// Makes a GPU the calling thread's current one, until the end of its scope.
class DeviceScope {
 public:
  explicit DeviceScope(int index);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  bool other_ = false;  // another GPU than the thread's current one
};

/// Throws Error unless `data` points to memory of the GPU: "key: in host memory, expected memory of cuda:0".
void check_pointer(const char* name, const void* data, Device device);

}  // namespace anyflash::cuda
