// What the library runs on.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <anyflash/tensor.h>

namespace anyflash {

struct DeviceInfo {
  Device device;
  std::string model;  ///< as its maker calls it, or "unknown"
  int threads = 0;    ///< of a CPU: what a call takes if it is not told
};

/// The devices of this machine that the library can use.
std::vector<DeviceInfo> devices();

/// Waits until the work queued on a stream (a cudaStream_t, null for the default one) of a GPU is done; on the cpu
/// there is none to wait for. Throws Error if the device is not there, or if work has failed.
void synchronize(Device device, void* stream = nullptr);

/// Waits until all is done that was queued on a device, on any stream.
void synchronize_device(Device device);

/// Memory of a device, which is given back with the last copy of the pointer. Throws Error if there is none left or no
/// such device.
std::shared_ptr<void> device_memory(Device device, std::size_t bytes);

/// Copies bytes between memory of the CPU and of a device, or within either, behind all that was queued on the device
/// before, and waits until they are there. Throws Error.
void copy_memory(void* to, const void* from, std::size_t bytes, Device device);

/// The instruction set that the CPU's kernels use, e.g. "AVX2", and all that were compiled in and run on this machine,
/// best first. The best one is used, unless the environment says otherwise: ANYFLASH_ISA=SSE4. Both throw Error if it
/// names none that runs here.
const char* instruction_set();
std::vector<const char*> instruction_sets();

/// Makes the CPU's kernels use an instruction set of the list from the next call on; "" for the best. No other thread
/// may be in a call meanwhile. Throws Error if the name is not in the list.
void use_instruction_set(std::string_view name);

}  // namespace anyflash
